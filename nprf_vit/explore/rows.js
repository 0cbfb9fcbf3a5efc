// Rows of attention matrices: 8 bits each, on a scale of the row's own. L layers, K heads, Q queries, N tokens.

class Rows {
  constructor(bytes, scale, image, view) {
    this.bytes = new Uint8Array(bytes);
    this.scale = new Float32Array(scale);
    this.layers = image.layers;
    this.heads = image.heads;
    this.prefix = view.prefix.length;
    this.queries = this.prefix + view.rows.length * view.columns.length;
    this.tokens = this.prefix + view.grid[0] * view.grid[1];
  }

  static async of(image, view) {
    const [bytes, scale] = await Promise.all([unpack(image.bytes), unpack(image.scale)]);
    return new Rows(bytes, scale, image, view);
  }

  // weights (N) of one head, or of the mean of all heads where head is -1
  row(layer, head, query) {
    if (head >= 0) return this.add(new Float64Array(this.tokens), layer, head, query, 1);
    const mean = new Float64Array(this.tokens);
    for (let each = 0; each < this.heads; each += 1) this.add(mean, layer, each, query, 1 / this.heads);
    return mean;
  }

  add(sum, layer, head, query, factor) {
    const index = (layer * this.heads + head) * this.queries + query;
    const [low, high] = [this.scale[2 * index], this.scale[2 * index + 1]];
    const first = index * this.tokens;
    for (let j = 0; j < this.tokens; j += 1) {
      sum[j] += factor * (low + ((high - low) * this.bytes[first + j]) / 255);
    }
    return sum;
  }
}

// the stored query nearest to a place of the grid
function nearestQuery(view, place) {
  const near = (stored, at) => stored.reduce((best, each, i) => (Math.abs(each - at) < Math.abs(stored[best] - at) ? i : best), 0);
  const [row, column] = [near(view.rows, place.y), near(view.columns, place.x)];
  return {
    query: view.prefix.length + row * view.columns.length + column,
    y: view.rows[row],
    x: view.columns[column],
  };
}

// how a row is spread: on how many tokens, and how far from the query
function spread(row, view, at) {
  let entropy = 0;
  let far = 0;
  let onGrid = 0;
  const first = view.prefix.length;
  for (let j = 0; j < row.length; j += 1) {
    if (row[j] > 0) entropy -= row[j] * Math.log(row[j]);
    if (j < first) continue;
    const [y, x] = [Math.floor((j - first) / view.grid[1]), (j - first) % view.grid[1]];
    onGrid += row[j];
    far += row[j] * Math.hypot(y - at.y, x - at.x);
  }
  return { patches: Math.exp(entropy), distance: onGrid > 0 ? far / onGrid : 0 };
}

// one pixel per token of the grid
function paintRow(canvas, row, view, high) {
  const [height, width] = view.grid;
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  const context = canvas.getContext('2d');
  const pixels = context.createImageData(width, height);
  const first = view.prefix.length;
  for (let j = 0; j < height * width; j += 1) {
    const colour = colourOf('heat', high > 0 ? row[first + j] / high : 0);
    pixels.data.set([...colour, 255], 4 * j);
  }
  context.putImageData(pixels, 0, 0);
}

function largestOnGrid(row, view) {
  let high = 0;
  for (let j = view.prefix.length; j < row.length; j += 1) high = Math.max(high, row[j]);
  return high;
}
