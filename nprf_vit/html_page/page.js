// What all pages share: elements, data, colours, light and dark.

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const byId = (id) => document.getElementById(id);
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

function readData() {
  return JSON.parse(byId('data').textContent);
}

// bytes of what html_page/build.py packed: base64 of a deflated array
async function unpack(text) {
  const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream('deflate'));
  return new Response(stream).arrayBuffer();
}

// a share of one with three digits, however small
function percent(value) {
  const hundred = 100 * value;
  if (hundred === 0) return '0 %';
  return `${Math.abs(hundred) < 0.01 ? hundred.toExponential(1) : hundred.toPrecision(3)} %`;
}

function short(value) {
  if (value === null || value === undefined) return '–';
  if (!Number.isFinite(value)) return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value);
  const size = Math.abs(value);
  return size >= 1e5 || size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

// stops of colours at equal distances, dark to light; a map is 256 colours of them
const STOPS = {
  heat: ['#0b0724', '#3b0f6f', '#8c2981', '#de4968', '#fe9f6d', '#fcfdbf'],
  sign: ['#1f5fa8', '#6aa6d8', '#cfe0ee', '#f4f3f1', '#f6d3c3', '#e58a69', '#b3371f'],
};

function colourMap(name) {
  const stops = STOPS[name].map((hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)));
  return Array.from({ length: 256 }, (_, i) => {
    const at = (i / 255) * (stops.length - 1);
    const left = Math.min(Math.floor(at), stops.length - 2);
    return stops[left].map((from, channel) => Math.round(from + (stops[left + 1][channel] - from) * (at - left)));
  });
}

const MAPS = { heat: colourMap('heat'), sign: colourMap('sign') };

function colourOf(map, share) {
  return MAPS[map][clamp(Math.round(share * 255), 0, 255)];
}

const LINES = ['#c2417c', '#2a78c8', '#c7741b', '#2c8f63', '#7a5ac9', '#8a8f2a', '#b0473a', '#3f8f9c'];

const theme = {
  preferred: () => (window.matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light'),
  chosen: null,
  apply() {
    document.documentElement.dataset.theme = this.chosen || this.preferred();
  },
  toggle() {
    this.chosen = document.documentElement.dataset.theme === 'dark' ? 'light' : 'dark';
    this.apply();
  },
};

theme.apply();
window.matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => theme.apply());

// keys that mean something while no text is being typed and nothing is being chosen
function onKey(actions) {
  document.addEventListener('keydown', (event) => {
    const inside = event.target.closest('input, select, textarea');
    if (event.ctrlKey || event.metaKey || event.altKey || inside) return;
    const action = actions[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });
}
