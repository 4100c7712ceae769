// The page: the overview of the run, and the way from it to a rollout and a call, which the address holds.

const data = JSON.parse(document.getElementById('data').textContent);
data.severity = new Map(data.kinds.map((kind) => [kind.kind, kind.severity]));
data.byId = new Map(data.rollouts.map((rollout) => [rollout.id, rollout]));
for (const rollout of data.rollouts) {
  rollout.found = rollout.findings || [];
  rollout.fails = rollout.found.filter((f) => data.severity.get(f.kind) === 'fail').length;
  let words = null;
  rollout.words = () => {
    if (words === null) words = [rollout.id, ...rollout.found.map((f) => `${f.kind} ${f.text}`), ...(rollout.tree ? rollout.tree.id : [])].join('\n').toLowerCase();
    return words;
  };
}

const main = document.getElementById('main');
const table = rolloutTable(data);
const choose = (wanted) => { table.set({ text: '', state: '', kind: '', ...wanted }); document.getElementById('rollouts').scrollIntoView(); document.getElementById('rollouts').focus({ preventScroll: true }); };

function tiles() {
  const t = data.totals;
  const tile = (number, word) => h('div', { class: 'tile' }, h('b', null, number), word);
  return h('section', { class: 'tiles', 'aria-label': 'Totals' }, tile(count(t.rollouts), t.rollouts === 1 ? 'rollout' : 'rollouts'),
    tile(count(t.calls), t.calls === 1 ? 'call' : 'calls'), tile(size(t.bytes), 'stored'), tile(count(t.incomplete), 'incomplete'),
    t.archived > 0 && tile(count(t.archived), 'archived'), t.ledgers > 0 && tile(count(t.ledgers), t.ledgers === 1 ? 'ledger' : 'ledgers'));
}

function contents() {
  const places = [['found', 'What was found'], ['timeline', 'Over time'], ['evidence', 'What is kept'], ['distributions', 'Distributions'],
    ...(data.about.length ? [['about', 'The run as a whole']] : []), ['rollouts', 'Rollouts']];
  return h('nav', { class: 'contents', 'aria-label': 'On this page' }, places.map(([id, words]) => h('a', { href: `#${id}` }, words)));
}

function kinds() {
  const rows = [...data.kinds].sort((one, other) => (one.severity === other.severity ? 0 : one.severity === 'fail' ? -1 : 1));
  const body = rows.map((k) => h('tr', null,
    h('td', null, h('span', { class: `mark ${k.severity}`, 'aria-hidden': 'true' }, k.severity === 'fail' ? '✕' : '·'),
      k.rollouts > 0 ? h('button', { type: 'button', class: 'link', onclick: () => choose({ kind: k.kind }) }, k.kind) : k.kind),
    h('td', null, k.severity === 'fail' ? 'fails' : 'note'), h('td', { class: 'num' }, count(k.count)),
    h('td', { class: 'num' }, k.rollouts ? count(k.rollouts) : '–'), h('td', { class: 'muted meaning' }, k.meaning)));
  return h('section', { class: 'card', 'aria-labelledby': 'found' }, h('h2', { id: 'found' }, 'What was found'),
    rows.length ? h('div', { class: 'scroll' }, h('table', { class: 'kinds' }, h('thead', null, h('tr', null, h('th', { scope: 'col' }, 'Kind'), h('th', { scope: 'col' }, 'Verdict'),
      h('th', { scope: 'col', class: 'num' }, 'Findings'), h('th', { scope: 'col', class: 'num' }, 'Rollouts'), h('th', { scope: 'col', class: 'meaning' }, 'Meaning'))), h('tbody', null, body)))
      : h('p', { class: 'muted' }, 'Nothing: every object was read, and every digest holds.'));
}

function states() {
  const t = data.totals;
  const rows = (of, unit) => {
    const total = Math.max(...Object.values(of), 1);
    return h('tbody', null, Object.entries(of).map(([state, n]) => h('tr', null,
      h('td', null, n ? h('button', { type: 'button', class: 'link', onclick: () => choose({ state }) }, state) : state),
      h('td', null, meter(n / total, `${state}: ${unit(n)}`)), h('td', { class: 'num' }, unit(n)))));
  };
  return h('div', { class: 'grid' },
    h('section', { class: 'card' }, h('h2', null, 'Rollouts by state'), h('table', { class: 'dist' }, rows(t.states, count))),
    h('section', { class: 'card' }, h('h2', null, 'Bytes by state'), h('table', { class: 'dist' }, rows(t.bytes_by_state, size))));
}

function overview() {
  const undated = data.undated ? ` ${many(data.undated, 'call')} without any time ${data.undated === 1 ? 'is' : 'are'} not in it.` : '';
  return [tiles(), contents(), kinds(), states(),
    h('section', { class: 'card', id: 'timeline' }, h('h2', null, 'The run over time'), lanes(data.timeline, 'The run over time'),
      h('p', { class: 'muted small' }, `When the store says that each object was created; where it does not say, when its writer does.${undated}`)),
    h('section', { class: 'card', id: 'evidence' }, h('h2', null, 'What is kept, and why, over time'), lanes(data.evidence, 'Evidence by reason'),
      h('p', { class: 'muted small' }, 'What is still in the bucket, by the reason it is kept for, at the time it came.')),
    h('div', { class: 'grid', id: 'distributions' },
      h('section', { class: 'card' }, h('h2', null, 'From begin to record'), distribution(data.recorded, lasting, 'Time to generate'),
        h('p', { class: 'muted small' }, 'From the time in the intent to the record’s own time, both by the clocks of the writers. Records that are older than their intent (a recording played again) are left out.')),
      h('section', { class: 'card' }, h('h2', null, 'From begin to stored'), distribution(data.stored, lasting, 'Time to be durable'),
        h('p', { class: 'muted small' }, 'Between the creation of intent and outcome, both by the store’s clock, which S3 tells in whole seconds.'))),
    h('div', { class: 'grid' },
      h('section', { class: 'card' }, h('h2', null, 'Size of a call'), distribution(data.sizes, size, 'Bytes as stored')),
      h('section', { class: 'card' }, h('h2', null, 'Tokens of a call'), distribution(data.tokens, count, 'Prompt and generation as stored'),
        h('p', { class: 'muted small' }, 'A delta counts only what it holds itself.'))),
    data.about.length > 0 && h('section', { class: 'card', id: 'about' }, h('h2', null, 'About the run as a whole'), foundList(data, data.about.slice(0, 500), 'run'),
      data.about.length > 500 && h('p', { class: 'muted small' }, `and ${count(data.about.length - 500)} more; --json has all`)),
    data.left.length > 0 && h('section', { class: 'card', id: 'left' }, h('h2', null, 'Left out of this page'), h('ul', null, data.left.map((text) => h('li', null, text)))),
    table.card];
}

let scrolled = 0;
let home = null;
function route() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  const id = wanted.get('rollout');
  if (id === null) {
    if (home === null) { home = h('div'); home.append(...overview().filter(Boolean)); }
    if (main.firstChild !== home) { main.replaceChildren(home); window.scrollTo(0, scrolled); }
    document.title = document.querySelector('h1').textContent;
    return;
  }
  if (home !== null && main.firstChild === home) scrolled = window.scrollY;
  const rollout = data.byId.get(id);
  const number = wanted.get('call');
  main.replaceChildren(...(rollout ? rolloutView(data, rollout, number === null ? null : Number(number) - 1)
    : [h('section', { class: 'card' }, h('h2', { tabindex: -1, id: 'rollout-name' }, 'No such rollout'),
      h('p', null, 'This page has no rollout ', h('span', { class: 'mono' }, visible(id)), '. ', h('a', { href: '#' }, 'All rollouts')))]).filter(Boolean));
  const target = document.getElementById(number === null ? 'rollout-name' : 'call-name') || document.getElementById('rollout-name');
  target.focus({ preventScroll: true });
  if (number === null) window.scrollTo(0, 0); else target.scrollIntoView({ block: 'start' });
  const here = document.querySelector('.tree .here');
  if (here) here.scrollIntoView({ block: 'nearest', inline: 'center' });
  document.title = `${rollout ? rollout.id : 'No such rollout'} – ${document.querySelector('h1').textContent}`;
}

function themes() {
  const dark = window.matchMedia('(prefers-color-scheme: dark)');
  let chosen = null;
  const button = h('button', { type: 'button', id: 'theme-button' });
  const apply = () => {
    const now = chosen || (dark.matches ? 'dark' : 'light');
    document.documentElement.dataset.theme = now;
    button.textContent = now === 'dark' ? 'Light theme' : 'Dark theme';
  };
  button.addEventListener('click', () => { chosen = document.documentElement.dataset.theme === 'dark' ? 'light' : 'dark'; apply(); });
  dark.addEventListener('change', apply);
  document.getElementById('theme').append(button);
  apply();
}

document.getElementById('where').textContent = visible(`${data.url} · made ${when(data.made_at)} UTC${data.selection ? ` · only ${data.selection}` : ''}`);
document.getElementById('foot').textContent = `Made by s3capture ${data.version}. Times are UTC; sizes are in powers of 1000. This file needs no network.`;
document.getElementById('skip').addEventListener('click', (event) => { event.preventDefault(); location.hash = '#'; route(); choose({}); });
themes();
window.addEventListener('hashchange', route);
route();
