// Elements and words. Everything that comes from the data becomes a text node or a plain attribute, never markup.

const SVG = 'http://www.w3.org/2000/svg';

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? '' : String(value));
  }
  for (const child of children.flat(3)) {
    if (child !== null && child !== undefined && child !== false) node.append(child instanceof Node ? child : String(child));
  }
  return node;
}

const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

const grouped = new Intl.NumberFormat('en-US');
const count = (number) => grouped.format(number);
const many = (number, word) => `${count(number)} ${word}${number === 1 ? '' : 's'}`;

function size(bytes) {
  let amount = bytes;
  for (const unit of ['B', 'kB', 'MB', 'GB']) {
    if (amount < 1000) return `${unit === 'B' || amount >= 100 ? Math.round(amount) : amount.toFixed(1)} ${unit}`;
    amount /= 1000;
  }
  return `${amount.toFixed(1)} TB`;
}

// Unix seconds as UTC; what is no time of the calendar (records carry their writers' words) is shown as the number.
function when(seconds) {
  if (seconds === null || seconds === undefined) return '–';
  const date = new Date(seconds * 1000);
  return Number.isNaN(date.getTime()) ? String(seconds) : date.toISOString().slice(0, 19).replace('T', ' ');
}

function lasting(seconds) {
  if (seconds === 0) return '0 s';
  if (seconds < 1) return `${+(seconds * 1000).toPrecision(3)} ms`;
  if (seconds < 120) return `${+seconds.toPrecision(3)} s`;
  if (seconds < 7200) return `${+(seconds / 60).toPrecision(3)} min`;
  if (seconds < 172800) return `${+(seconds / 3600).toPrecision(3)} h`;
  return `${+(seconds / 86400).toPrecision(3)} d`;
}

// JSON spells control characters out, and the page does as well: an id is anyone's.
const visible = (text) =>
  String(text).replace(/[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g,
    (char) => `\\u${char.charCodeAt(0).toString(16).padStart(4, '0')}`);

const place = (rollout, call) =>
  `#rollout=${encodeURIComponent(rollout)}${call === undefined ? '' : `&call=${call + 1}`}`;

function tag(kind, severity, text) {
  const fails = severity === 'fail';
  return h('span', { class: `tag${fails ? ' fail' : ''}` }, fails ? '✕ ' : '', text || kind);
}
