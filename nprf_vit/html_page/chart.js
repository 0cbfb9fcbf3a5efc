// Line charts in SVG: axes with round numbers, a cross line that tells the values.

const SVG = 'http://www.w3.org/2000/svg';

function shape(tag, attributes = {}, text = null) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== null) node.textContent = text;
  return node;
}

function ticks(low, high, count) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((value) => value >= raw * 0.8);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i += 1) {
    found.push(Number((i * step).toPrecision(12)));
  }
  return found;
}

function limits(values, log) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (!Number.isFinite(value) || (log && value <= 0)) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (low > high) return log ? [1, 10] : [0, 1];
  if (low === high) return log ? [low / 2, high * 2] : [low - Math.abs(low || 1) * 0.05, high + Math.abs(high || 1) * 0.05];
  return [low, high];
}

// series: [{name, colour, points: [[x, y], ...], faint, dash}]; options: {x, y, log, zero, height}
function lineChart(series, options = {}) {
  const width = options.width || 460;
  const height = options.height || 230;
  const margin = { left: 48, right: 10, top: 10, bottom: 34 };
  const log = Boolean(options.log);
  const all = series.flatMap((one) => one.points);
  const [left, right] = limits(all.map((point) => point[0]), false);
  let [low, high] = limits(all.map((point) => point[1]), log);
  if (!log) [low, high] = [low - (high - low) * 0.04, high + (high - low) * 0.04];
  const scale = (value) => (log ? Math.log10(value) : value);
  const X = (x) => margin.left + ((x - left) / (right - left)) * (width - margin.left - margin.right);
  const share = (y) => (scale(y) - scale(low)) / (scale(high) - scale(low));
  const Y = (y) => height - margin.bottom - share(y) * (height - margin.top - margin.bottom);
  const svg = shape('svg', { viewBox: `0 0 ${width} ${height}`, class: 'chart', role: 'img' });
  svg.setAttribute('aria-label', `${options.y || ''} over ${options.x || ''}: ${series.map((one) => one.name).join(', ')}`);

  const rows = log ? ticks(scale(low), scale(high), 4).map((power) => 10 ** power) : ticks(low, high, 4);
  for (const value of rows) {
    const kind = value === 0 && options.zero ? 'zero' : 'grid';
    svg.append(shape('line', { class: kind, x1: margin.left, x2: width - margin.right, y1: Y(value), y2: Y(value) }));
    svg.append(shape('text', { x: margin.left - 6, y: Y(value) + 4, 'text-anchor': 'end' }, short(value)));
  }
  for (const value of ticks(left, right, 5)) {
    svg.append(shape('text', { x: X(value), y: height - margin.bottom + 15, 'text-anchor': 'middle' }, short(value)));
  }
  if (options.x) {
    const middle = (margin.left + width - margin.right) / 2;
    svg.append(shape('text', { x: middle, y: height - 4, 'text-anchor': 'middle' }, options.x));
  }
  for (const one of series) {
    const path = one.points
      .filter((point) => Number.isFinite(point[1]) && (!log || point[1] > 0))
      .map((point) => `${X(point[0]).toFixed(1)},${Y(point[1]).toFixed(1)}`);
    const line = { class: 'series', points: path.join(' '), stroke: one.colour, opacity: one.faint ? 0.4 : 1 };
    if (one.dash) line['stroke-dasharray'] = '5 4';
    svg.append(shape('polyline', line));
    if (path.length === 1) {
      const [x, y] = path[0].split(',');
      svg.append(shape('circle', { cx: x, cy: y, r: 3, fill: one.colour }));
    }
  }
  if (options.told) addCross(svg, series, { X, left, right, width, height, margin }, options.told);
  return svg;
}

// the value of each series that is nearest to the pointer, told to the caller; null when it leaves
function addCross(svg, series, frame, told) {
  const cross = shape('line', { class: 'cross', y1: frame.margin.top, y2: frame.height - frame.margin.bottom });
  cross.style.display = 'none';
  svg.append(cross);
  const move = (event) => {
    const box = svg.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * frame.width;
    const inner = frame.width - frame.margin.left - frame.margin.right;
    const x = frame.left + ((at - frame.margin.left) / inner) * (frame.right - frame.left);
    const found = series.map((one) => ({ name: one.name, point: nearest(one.points, x) })).filter((one) => one.point);
    if (!found.length) return;
    const first = found.reduce((a, b) => (Math.abs(b.point[0] - x) < Math.abs(a.point[0] - x) ? b : a)).point[0];
    cross.setAttribute('x1', frame.X(first));
    cross.setAttribute('x2', frame.X(first));
    cross.style.display = '';
    told(first, found);
  };
  svg.addEventListener('pointermove', move);
  svg.addEventListener('pointerdown', move);
  svg.addEventListener('pointerleave', () => {
    cross.style.display = 'none';
    told(null, []);
  });
}

function nearest(points, x) {
  let best = null;
  for (const point of points) {
    if (point[1] !== null && (best === null || Math.abs(point[0] - x) < Math.abs(best[0] - x))) best = point;
  }
  return best;
}
