// The learned bias of every head and layer as a picture, and the chosen one with its profile.

class BiasPart {
  constructor(model, named) {
    this.model = model;
    this.large = element('canvas', { class: 'large', 'aria-label': 'bias of the chosen head' });
    this.profile = element('div');
    this.keys = element('p', { class: 'keys' });
    this.title = element('p', { class: 'caption' });
    this.tables = element('div', { class: 'tables' });
    const detail = element('div', {}, this.title, this.large, this.profile, this.keys);
    const name = named ? element('p', { class: 'caption' }, model.name) : null;
    this.node = element('div', {}, name, element('div', { class: 'bias' }, this.tables, detail));
  }

  async show() {
    this.values = await Promise.all(this.model.biases.map(async (bias) => new Float32Array(await unpack(bias.values))));
    const heads = this.model.biases[0].shape[0];
    const labels = this.model.biases.length > 1;
    this.tables.style.gridTemplateColumns = `${labels ? '3.4rem ' : ''}repeat(${heads}, minmax(0, 8.5rem))`;
    if (labels) this.tables.append(element('span'));
    for (let head = 0; head < heads; head += 1) this.tables.append(element('span', { class: 'name head' }, String(head + 1)));
    this.buttons = this.model.biases.flatMap((bias, i) => {
      if (labels) this.tables.append(element('span', { class: 'name' }, bias.title));
      return Array.from({ length: heads }, (_, head) => this.tile(bias, i, head));
    });
    this.choose(0, 0);
  }

  tile(bias, index, head) {
    const canvas = element('canvas');
    paintBias(canvas, this.table(index, head), bias);
    const label = `${bias.title}, head ${head + 1}`;
    const act = () => this.choose(index, head);
    const button = element('button', { type: 'button', title: label, 'aria-label': `bias of ${label}`, onclick: act }, canvas);
    this.tables.append(button);
    return { index, head, button };
  }

  table(index, head) {
    const [, rows, columns] = this.model.biases[index].shape;
    return this.values[index].subarray(head * rows * columns, (head + 1) * rows * columns);
  }

  choose(index, head) {
    const bias = this.model.biases[index];
    const table = this.table(index, head);
    for (const each of this.buttons) each.button.setAttribute('aria-pressed', each.index === index && each.head === head);
    paintBias(this.large, table, bias);
    const beyond = bias.far ? `; ${short(bias.far[head])} beyond the table` : '';
    const [low, high] = [Math.min(...table), Math.max(...table)];
    this.title.textContent = `${bias.title}, head ${head + 1}: ${short(low)} to ${short(high)}${beyond}`;
    const series = bias.past ? pastProfile(table) : profiles(table, bias.shape[1], bias.shape[2]);
    const x = bias.past ? 'bytes back' : 'offset of the key, in patches';
    this.profile.replaceChildren(lineChart(series, { x, y: 'bias', zero: true, width: 340, height: 190 }));
    this.keys.replaceChildren(
      ...series.map((one) => {
        const line = element('i');
        line.style.background = one.colour;
        return element('span', {}, line, one.name);
      }),
    );
  }
}

// blue below the mean of the head, red above: a constant added to a head changes nothing
function paintBias(canvas, table, bias) {
  const [, height, width] = bias.shape;
  Object.assign(canvas, { width, height });
  const mean = table.reduce((a, b) => a + b, 0) / table.length;
  const far = table.reduce((a, b) => Math.max(a, Math.abs(b - mean)), 1e-12);
  const context = canvas.getContext('2d');
  const pixels = context.createImageData(width, height);
  table.forEach((value, j) => pixels.data.set([...colourOf('sign', 0.5 + (value - mean) / far / 2), 255], 4 * j));
  context.putImageData(pixels, 0, 0);
}

function profiles(table, rows, columns) {
  const [y0, x0] = [(rows - 1) / 2, (columns - 1) / 2];
  const across = Array.from({ length: columns }, (_, x) => [x - x0, table[y0 * columns + x]]);
  const down = Array.from({ length: rows }, (_, y) => [y - y0, table[y * columns + x0]]);
  const sums = new Map();
  table.forEach((value, j) => {
    const distance = Math.round(Math.hypot(Math.floor(j / columns) - y0, (j % columns) - x0));
    const [sum, count] = sums.get(distance) || [0, 0];
    sums.set(distance, [sum + value, count + 1]);
  });
  const rings = [...sums].sort((a, b) => a[0] - b[0]).map(([distance, [sum, count]]) => [distance, sum / count]);
  return [
    { name: 'to the left and right', colour: LINES[1], points: across },
    { name: 'above and below', colour: LINES[2], points: down },
    { name: 'mean at a distance', colour: LINES[0], points: rings },
  ];
}

function pastProfile(table) {
  return [{ name: 'bias', colour: LINES[0], points: Array.from(table, (value, j) => [j, value]) }];
}

async function showBiases(data) {
  const with_bias = data.models.filter((model) => model.biases.length);
  const notes = ['Blue is below the mean of the head, red above. The middle is the patch itself, other places are keys around it.'];
  if (data.pixel) notes[0] = 'Blue is below the mean of the head, red above. Upper left is the byte itself; a row is one image row back.';
  for (const model of data.models) if (!model.biases.length) notes.push(`${model.name} has no relative position bias.`);
  byId('bias-note').textContent = with_bias.length ? notes.join(' ') : notes.slice(1).join(' ');
  for (const model of with_bias) {
    const part = new BiasPart(model, data.models.length > 1);
    byId('bias-models').append(part.node);
    await part.show();
  }
}
