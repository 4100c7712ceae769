// The rollouts: searched, filtered and sorted in memory, and drawn a page at a time, so that their number does not matter.

const PAGE = 50;
const COLUMNS = [
  ['Rollout', (r) => r.id, ''], ['State', (r) => r.state, ''], ['Calls', (r) => r.calls || 0, 'num'],
  ['Size', (r) => r.bytes || 0, 'num wide'], ['Changed (UTC)', (r) => r.changed || 0, 'wide'],
  ['Findings', (r) => r.fails * 1e6 + r.found.length, ''],
];
const natural = new Intl.Collator('en', { numeric: true });

function rolloutTable(data) {
  const view = { text: '', state: '', kind: '', column: 5, down: true, page: 0 };
  const rows = h('tbody');
  const told = h('span', { role: 'status', id: 'matches' });
  const buttons = [['First', () => 0], ['Previous', (p) => p - 1], ['Next', (p) => p + 1], ['Last', () => Infinity]]
    .map(([word, to]) => h('button', { type: 'button', onclick: () => { view.page = to(view.page); draw(); } }, word));
  let chosen = [];

  const matches = (r) => {
    if (view.state === 'incomplete' ? !r.incomplete : view.state === 'archived' ? !r.archived : view.state && r.state !== view.state) return false;
    if (view.kind === '(fails)' ? !r.fails : view.kind && !r.found.some((f) => f.kind === view.kind)) return false;
    return !view.text || r.words().includes(view.text);
  };
  const choose = () => {
    const key = COLUMNS[view.column][1];
    chosen = data.rollouts.filter(matches).sort((one, other) => {
      const [a, b] = [key(one), key(other)];
      const order = typeof a === 'number' ? a - b : natural.compare(a, b);
      return (view.down ? -order : order) || natural.compare(one.id, other.id);
    });
    view.page = 0;
    draw();
  };
  const headers = COLUMNS.map(([name, , look], i) => h('th', { scope: 'col', class: look }, h('button', {
    type: 'button', class: 'sort', onclick: () => {
      view.down = view.column === i ? !view.down : i > 1;
      view.column = i;
      choose();
    },
  }, name, ' ', h('span', { 'aria-hidden': 'true' }))));

  function draw() {
    const last = Math.max(Math.ceil(chosen.length / PAGE) - 1, 0);
    view.page = Math.min(Math.max(view.page, 0), last);
    const shown = chosen.slice(view.page * PAGE, (view.page + 1) * PAGE);
    rows.replaceChildren(...shown.map((r) => h('tr', { class: 'go' },
      h('td', null, h('a', { href: place(r.id), class: 'mono' }, r.id)),
      h('td', { class: 'state' }, r.state, r.archived && ', archived', r.incomplete && h('div', { class: 'small muted' }, 'incomplete')),
      h('td', { class: 'num' }, count(r.calls || 0)), h('td', { class: 'num wide' }, size(r.bytes || 0)),
      h('td', { class: 'wide' }, when(r.changed)), h('td', null, chips(r)))));
    headers.forEach((th, i) => {
      const [arrow] = th.getElementsByTagName('span');
      arrow.textContent = i !== view.column ? '' : view.down ? '▼' : '▲';
      if (i === view.column) th.setAttribute('aria-sort', view.down ? 'descending' : 'ascending');
      else th.removeAttribute('aria-sort');
    });
    const from = chosen.length ? view.page * PAGE + 1 : 0;
    told.textContent = `${count(from)}–${count(view.page * PAGE + shown.length)} of ${count(chosen.length)}`
      + (chosen.length === data.rollouts.length ? '' : ` chosen from ${count(data.rollouts.length)}`);
    buttons.forEach((button, i) => { button.disabled = i < 2 ? view.page === 0 : view.page === last; });
  }
  const chips = (r) => {
    const kinds = new Map();
    r.found.forEach((f) => kinds.set(f.kind, (kinds.get(f.kind) || 0) + 1));
    const grave = ([kind]) => (data.severity.get(kind) === 'fail' ? 0 : 1);
    return [...kinds].sort((one, other) => grave(one) - grave(other)).map(([kind, n]) => tag(kind, data.severity.get(kind), n > 1 ? `${kind} ×${n}` : kind));
  };

  const select = (label, id, options, on) => h('label', null, label, h('select', { id, onchange: (event) => on(event.target.value) },
    options.map(([value, text]) => h('option', { value }, text))));
  const states = [...new Set(data.rollouts.map((r) => r.state))].sort();
  const search = h('input', {
    type: 'search', id: 'search', placeholder: 'id, call, reason, digest …', autocomplete: 'off', spellcheck: 'false',
    oninput: (event) => { view.text = event.target.value.toLowerCase(); choose(); },
  });
  const stateBox = select('State', 'state', [['', 'any'], ...states.map((name) => [name, name]),
    ['incomplete', 'incomplete'], ['archived', 'archived']], (value) => { view.state = value; choose(); });
  const kindBox = select('Finding', 'kind', [['', 'any or none'], ['(fails)', 'any that fails'],
    ...data.kinds.map((k) => [k.kind, `${k.kind} (${count(k.rollouts)})`])], (value) => { view.kind = value; choose(); });
  const clear = h('button', { type: 'button', onclick: () => set({ text: '', state: '', kind: '' }) }, 'Clear');
  function set(wanted) {
    Object.assign(view, wanted);
    search.value = view.text;
    stateBox.querySelector('select').value = view.state;
    kindBox.querySelector('select').value = view.kind;
    choose();
  }
  choose();
  const card = h('section', { class: 'card', 'aria-labelledby': 'rollouts' }, h('h2', { id: 'rollouts', tabindex: -1 }, 'Rollouts'),
    h('div', { class: 'filters' }, h('label', { class: 'grow' }, 'Search', search), stateBox, kindBox, clear),
    h('div', { class: 'scroll' }, h('table', { id: 'table' }, h('thead', null, h('tr', null, headers)), rows)),
    h('div', { class: 'pager' }, told, buttons));
  return { card, set };
}
