// The branches of one rollout: a child stands right of its parent, a second child opens a row of its own.

const MOST_NODES = 1500;
const CELL = { x: 46, y: 50, r: 11 };

const SHAPES = {
  e: ['entry', 'circle', ''], d: ['delta entry', 'circle', 'Δ'], r: ['refusal', 'square', 'R'],
  s: ['sealed: begun, no outcome', 'diamond', '?'], o: ['open: begun, no outcome yet', 'circle-dashed', '…'],
  l: ['refused begin', 'triangle', 'L'], E: ['late: behind the freeze', 'triangle', 'L'], x: ['damaged', 'square', '!'],
};

function shape(letter, x, y, r) {
  const form = SHAPES[letter][1];
  const dashed = form === 'circle-dashed' || form === 'diamond' ? ' dashed' : '';
  const look = { class: `shape${dashed}` };
  if (form.startsWith('circle')) return s('circle', { ...look, cx: x, cy: y, r });
  if (form === 'square') return s('rect', { ...look, x: x - r + 1, y: y - r + 1, width: 2 * r - 2, height: 2 * r - 2, rx: 2 });
  const points = form === 'diamond'
    ? [[x, y - r - 2], [x + r + 2, y], [x, y + r + 2], [x - r - 2, y]]
    : [[x, y - r - 1], [x + r + 1, y + r - 1], [x - r - 1, y + r - 1]];
  return s('polygon', { ...look, points: points.map((point) => point.join(',')).join(' ') });
}

// Where each call stands: [column, row], in the order of a walk that takes the first child along the same row.
function places(up) {
  const children = new Map();
  up.forEach((parent, i) => { const of = parent < 0 ? -1 : parent; children.set(of, [...(children.get(of) || []), i]); });
  const at = new Array(up.length).fill(null);
  let row = 0;
  const waiting = (children.get(-1) || []).map((call) => [call, 0]).reverse();
  const walk = () => {
    while (waiting.length) {
      const [start, column] = waiting.pop();
      let call = start;
      let x = column;
      while (call !== undefined && at[call] === null) {
        at[call] = [x, row];
        const below = children.get(call) || [];
        below.slice(1).reverse().forEach((child) => waiting.push([child, x + 1]));
        [call] = below;
        x += 1;
      }
      row += 1;
    }
  };
  walk();
  // Calls that name each other in a circle hang on no root, and are shown all the same.
  up.forEach((_, i) => { if (at[i] === null) { waiting.push([i, 0]); walk(); } });
  return at;
}

function drawTree(rollout, marked, here) {
  const tree = rollout.tree;
  const total = Math.min(tree.up.length, MOST_NODES);
  const at = places(tree.up.slice(0, total).map((parent) => (parent >= total ? -2 : parent)));
  const middle = ([x, y]) => [30 + x * CELL.x, 34 + y * CELL.y];
  const [wide, high] = [Math.max(...at.map((p) => p[0])), Math.max(...at.map((p) => p[1]))];
  const edges = at.map((point, i) => {
    const parent = tree.up[i];
    if (parent === -1 || parent >= total) return null;
    const [x, y] = middle(point);
    if (parent === -2) return s('path', { class: 'edge dashed', d: `M${x - CELL.x * 0.6} ${y}H${x}` });
    const [px, py] = middle(at[parent]);
    return s('path', { class: 'edge', d: py === y ? `M${px} ${py}H${x}` : `M${px} ${py}V${y - 8}Q${px} ${y} ${px + 8} ${y}H${x}` });
  });
  const nodes = at.map((point, i) => {
    const [x, y] = middle(point);
    const letter = tree.kind[i];
    const bad = marked.has(tree.id[i]);
    const words = `call ${i + 1}, ${SHAPES[letter][0]}${bad ? ', with findings' : ''}: ${visible(tree.id[i])}`;
    return s('a', {
      href: place(rollout.id, i), 'aria-label': words, 'data-call': i,
      class: `${bad ? 'bad' : ''}${i === here ? ' here' : ''}`, 'aria-current': i === here ? 'true' : null,
    }, s('title', null, words), shape(letter, x, y, CELL.r),
    s('text', { x, y: y + 4 }, bad ? '✕' : SHAPES[letter][2] || ''), s('text', { class: 'label', x, y: y - 17 }, `#${i + 1}`));
  });
  const [width, height] = [60 + wide * CELL.x, 60 + high * CELL.y];
  const used = [...new Set(tree.kind.slice(0, total))];
  const legend = h('p', { class: 'legend' },
    used.map((letter) => h('span', null, s('svg', { width: 22, height: 20, 'aria-hidden': 'true' },
      shape(letter, 11, 10, 7), s('text', { x: 11, y: 14, class: 'label' }, SHAPES[letter][2])), SHAPES[letter][0])),
    marked.size > 0 && h('span', null, '✕ with findings that fail'),
    total < tree.up.length && h('span', null, `only the first ${count(total)} of ${count(tree.up.length)} calls are drawn`));
  return h('div', null,
    h('div', { class: 'tree', tabindex: 0, role: 'group', 'aria-label': 'Calls of the rollout as a tree; parents are left of their children' },
      s('svg', { width, height, viewBox: `0 0 ${width} ${height}` }, edges, nodes)), legend);
}
