// One rollout, and one call of it: facts, findings, the tree, and conflicting payloads side by side.

const CALL_ROWS = 300;

function facts(pairs) {
  return h('dl', { class: 'facts' }, pairs.filter(([, value]) => value !== null && value !== undefined && value !== '')
    .map(([name, value, look]) => [h('dt', null, name), h('dd', { class: look || null }, value instanceof Node ? value : visible(value))]));
}

// Findings with a way to what they are about: to their rollout from the run, to their call from the rollout.
function foundList(data, found, from) {
  return h('ul', { class: 'found' }, found.map((f) => {
    const rollout = data.byId.get(f.rollout);
    const index = from === 'rollout' && rollout && rollout.tree && f.call !== undefined ? rollout.tree.id.indexOf(f.call) : -1;
    const known = from === 'run' && rollout;
    return h('li', null, h('div', null, tag(f.kind, data.severity.get(f.kind))), h('div', null, visible(f.text),
      index >= 0 && h('span', null, ' ', h('a', { href: place(rollout.id, index) }, `call #${index + 1}`)),
      known && h('span', null, ' ', h('a', { href: place(f.rollout) }, 'rollout')),
      f.key && !f.text.includes(f.key) && h('div', { class: 'mono muted small' }, f.key)));
  }));
}

function sides(finding) {
  const { stored, refused, differences, more } = finding.conflict;
  const cell = (value) => (value === null ? h('td', null, h('span', { class: 'none' }, 'no such field')) : h('td', null, visible(value)));
  const head = (word, payload) => h('th', { scope: 'col' }, word, h('div', { class: 'mono muted small' }, payload.kind, ' ', payload.digest || ''),
    payload.by && h('div', { class: 'muted small' }, 'by ', visible(payload.by)));
  return h('div', { class: 'scroll' }, h('table', { class: 'sides' },
    h('caption', null, differences.length ? `${many(differences.length + more, 'field')} differ${differences.length + more === 1 ? 's' : ''}` : 'The two could not be compared.'),
    h('thead', null, h('tr', null, h('th', { scope: 'col' }, 'Field'), head('Stored', stored), head('Refused', refused))),
    h('tbody', null, differences.map((d) => h('tr', null, h('th', { scope: 'row', class: 'mono' }, visible(d.path)), cell(d.stored), cell(d.refused))))),
  more > 0 && h('p', { class: 'muted small' }, `and ${many(more, 'more field')}`));
}

function callCard(data, rollout, index) {
  const { tree } = rollout;
  const of = (name) => (tree[name] ? tree[name][index] : null);
  const found = rollout.found.filter((f) => f.call === tree.id[index]);
  const up = tree.up[index];
  const parent = up >= 0 ? h('a', { href: place(rollout.id, up) }, `#${up + 1} `, h('span', { class: 'mono' }, visible(tree.id[up])))
    : up === -2 ? `${of('parent_call') || 'named'} (not in the rollout)` : null;
  const tokens = tree.in[index] === null ? null
    : `${count(tree.in[index])} in the prompt${tree.kind[index] === 'd' ? ' (behind the parent’s)' : ''}, ${count(tree.out[index])} generated`;
  return h('section', { class: 'card', id: 'call', 'aria-labelledby': 'call-name' },
    h('h2', { id: 'call-name', tabindex: -1 }, `Call #${index + 1}`),
    facts([['Call id', tree.id[index] || '(the empty id)', 'mono'], ['Kind', SHAPES[tree.kind[index]][0]], ['Parent', parent], ['Tokens', tokens],
      ['Size', size(tree.bytes[index])], ['Refusal code', of('code')],
      ['Begun', of('begun_at') && `${when(of('begun_at'))} UTC by ${of('begun_by') || 'an unnamed process'}`],
      [tree.kind[index] === 's' ? 'Sealed' : 'Created', of('created_at') && `${when(of('created_at'))} UTC${of('by') ? ` by ${of('by')}` : ''}`],
      ['Payload', of('digest'), 'mono']]),
    found.length > 0 && h('div', null, h('h3', null, 'Findings'), foundList(data, found, 'call')),
    found.filter((f) => f.conflict).map((f) => h('div', null, h('h3', null, 'Conflicting fields'), sides(f))));
}

function callTable(rollout, here) {
  const { tree } = rollout;
  const body = h('tbody');
  const more = h('button', { type: 'button' });
  let shown = 0;
  const draw = (upTo) => {
    for (; shown < Math.min(upTo, tree.id.length); shown += 1) {
      const i = shown;
      const up = tree.up[i];
      body.append(h('tr', { class: i === here ? 'go here' : 'go' },
        h('td', { class: 'num' }, `#${i + 1}`), h('td', null, h('a', { href: place(rollout.id, i), class: 'mono' }, visible(tree.id[i]) || '(the empty id)')),
        h('td', null, SHAPES[tree.kind[i]][0]), h('td', { class: 'num' }, up >= 0 ? `#${up + 1}` : up === -2 ? 'missing' : ''),
        h('td', { class: 'num' }, tree.in[i] === null ? '' : `${tree.kind[i] === 'd' ? '+' : ''}${count(tree.in[i])}`),
        h('td', { class: 'num' }, tree.out[i] === null ? '' : count(tree.out[i])), h('td', { class: 'num wide' }, size(tree.bytes[i]))));
    }
    more.textContent = `Show more (${count(shown)} of ${count(tree.id.length)})`;
    more.classList.toggle('hidden', shown >= tree.id.length);
  };
  more.addEventListener('click', () => draw(shown + CALL_ROWS));
  draw(CALL_ROWS);
  return h('div', null, h('div', { class: 'scroll' }, h('table', null, h('thead', null, h('tr', null,
    h('th', { scope: 'col', class: 'num' }, 'Nr'), h('th', { scope: 'col' }, 'Call'), h('th', { scope: 'col' }, 'Kind'),
    h('th', { scope: 'col', class: 'num' }, 'Parent'), h('th', { scope: 'col', class: 'num' }, 'In'), h('th', { scope: 'col', class: 'num' }, 'Out'),
    h('th', { scope: 'col', class: 'num wide' }, 'Size'))), body)), more);
}

function rolloutView(data, rollout, index) {
  const crumb = (text, href, current) => h('li', null, href ? h('a', { href }, text) : h('span', { 'aria-current': current ? 'page' : null }, text));
  const marked = new Set(rollout.found.filter((f) => data.severity.get(f.kind) === 'fail' && f.call !== undefined).map((f) => f.call));
  const call = rollout.tree && index !== null && index >= 0 && index < rollout.tree.id.length ? index : null;
  const calls = h('section', { class: 'card' }, h('h2', null, 'Calls'), rollout.tree
    ? [drawTree(rollout, marked, call), h('details', { open: call === null }, h('summary', null, 'As a table'), callTable(rollout, call))]
    : h('p', { class: 'muted' }, rollout.calls ? 'The calls of this rollout were left out of the page to keep it small.' : 'No calls are stored.'));
  const found = h('section', { class: 'card' }, h('h2', null, rollout.found.length ? many(rollout.found.length, 'finding') : 'No findings'),
    rollout.found.length ? foundList(data, rollout.found, 'rollout') : h('p', { class: 'muted' }, 'Every object was read, and every digest holds.'));
  return [
    h('nav', { class: 'crumbs', 'aria-label': 'Where you are' }, h('ol', null, crumb(`Run ${data.run}`, '#'),
      crumb(`Rollout ${rollout.id}`, call === null ? null : place(rollout.id), call === null), call !== null && crumb(`Call #${call + 1}`, null, true))),
    h('section', { class: 'card' }, h('h2', { id: 'rollout-name', tabindex: -1, class: 'mono' }, rollout.id),
      facts([['State', `${rollout.state}${rollout.archived ? ', archived' : ''}${rollout.version ? `, version ${rollout.version}` : ''}`],
        ['Complete', rollout.incomplete ? 'no' : 'yes'], ['Holds', `${many(rollout.calls || 0, 'call')}, ${size(rollout.bytes || 0)}`],
        ['Last change', rollout.changed && `${when(rollout.changed)} UTC`], ['Snapshot', rollout.snapshot, 'mono']])),
    ...(call === null ? [found, calls] : [calls, callCard(data, rollout, call), found]),
  ];
}
