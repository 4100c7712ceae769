// Lanes over time and bars by size. Each chart says its numbers in text as well: colour and length carry nothing alone.

function meter(part, label) {
  return s('svg', { class: 'meter', viewBox: '0 0 100 12', preserveAspectRatio: 'none', role: 'img', 'aria-label': label },
    s('rect', { class: 'track', x: 0, y: 0, width: 100, height: 12 }),
    part > 0 && s('rect', { class: 'fill', x: 0, y: 0, width: Math.max(part * 100, 0.6), height: 12 }));
}

function lanes(chart, label, describe) {
  const filled = chart.lanes.some((lane) => lane.total > 0);
  if (!filled) return h('p', { class: 'muted' }, 'Nothing here carries a time.');
  const width = chart.lanes[0].counts.length;
  const end = chart.start + chart.step * width;
  // A short run has few bins: their bars stay bars.
  const thick = 0.84 * Math.min(width / 24, 1);
  const rows = chart.lanes.flatMap((lane) => {
    const most = Math.max(...lane.counts, 1);
    const bars = lane.counts.map((n, i) => n > 0 && s('rect', {
      x: i + (1 - thick) / 2, y: 26 - Math.max((n / most) * 25, 1.5), width: thick, height: Math.max((n / most) * 25, 1.5),
    }, s('title', null, `${when(chart.start + i * chart.step)} UTC: ${count(n)}`)));
    const peak = lane.total ? `, at most ${count(most)} in ${lasting(chart.step)}` : '';
    return [
      h('div', { class: 'lane' }, describe ? describe(lane.name) : lane.name),
      s('svg', {
        viewBox: `0 0 ${width} 26`, preserveAspectRatio: 'none', role: 'img',
        'aria-label': `${lane.name}: ${count(lane.total)}${peak}`,
      }, bars),
      h('div', { class: 'lane num' }, count(lane.total)),
    ];
  });
  const half = chart.start + chart.step * Math.floor(width / 2);
  const axis = [h('div'), h('div', { class: 'axis' },
    h('span', null, when(chart.start)), width > 3 && h('span', { class: 'wide' }, when(half)), h('span', null, when(end))), h('div')];
  const table = h('details', null, h('summary', null, 'As a table'));
  // Made when it is looked at: a run has many bins, and few ask.
  table.addEventListener('toggle', () => {
    if (table.childElementCount > 1) return;
    const bins = [...Array(width).keys()].filter((i) => chart.lanes.some((lane) => lane.counts[i] > 0));
    table.append(h('div', { class: 'scroll' }, h('table', null,
      h('caption', null, `${label}, every ${lasting(chart.step)}`),
      h('thead', null, h('tr', null, h('th', { scope: 'col' }, 'From (UTC)'),
        chart.lanes.map((lane) => h('th', { scope: 'col', class: 'num' }, lane.name)))),
      h('tbody', null, bins.map((i) => h('tr', null, h('td', null, when(chart.start + i * chart.step)),
        chart.lanes.map((lane) => h('td', { class: 'num' }, count(lane.counts[i])))))))));
  });
  return h('div', null, h('div', { class: 'lanes' }, rows, axis),
    h('p', { class: 'muted small' }, `One bar is ${lasting(chart.step)}; each lane has its own scale. UTC.`), table);
}

function distribution(chart, unit, label) {
  if (!chart.n) return h('p', { class: 'muted' }, 'Nothing to measure: no call carries both times.');
  const most = Math.max(...chart.counts);
  const first = chart.counts.findIndex((n) => n > 0);
  const last = chart.counts.findLastIndex((n) => n > 0);
  const range = (i) => {
    if (i === 0) return `under ${unit(chart.edges[0])}`;
    if (i === chart.edges.length) return `${unit(chart.edges[i - 1])} and more`;
    return `${unit(chart.edges[i - 1])} – ${unit(chart.edges[i])}`;
  };
  return h('div', null,
    h('table', { class: 'dist' }, h('caption', null,
      `${label}, ${many(chart.n, 'call')}: half within ${unit(chart.p50)}, 95% within ${unit(chart.p95)}, at most ${unit(chart.max)}`),
    h('tbody', null, chart.counts.map((n, i) => i >= first && i <= last && h('tr', null, h('td', { class: 'num' }, range(i)),
      h('td', null, meter(n / most, `${range(i)}: ${count(n)}`)), h('td', { class: 'num' }, count(n)))))));
}
