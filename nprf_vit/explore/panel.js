// One panel: a view of the chosen image. The picture with its attention, predictions, and all heads of all layers.

class Panel {
  constructor(data, state, index, changed) {
    Object.assign(this, { data, state, index, changed });
    this.cache = new Map();
    this.loaded = null;
    this.token = 0;
    this.choice = element('select', { 'aria-label': 'model and size', onchange: () => this.choose(Number(this.choice.value)) });
    data.views.forEach((view, i) => {
      const name = data.models.length > 1 ? `${data.models[view.model].name} · ${view.title}` : view.title;
      this.choice.append(element('option', { value: i }, name));
    });
    this.canvas = element('canvas', { tabindex: 0, 'aria-label': 'image: point at a patch to see where it attends' });
    this.ramp = element('div', { class: 'ramp' });
    this.high = element('span', { class: 'soft number' });
    this.readout = element('p', { class: 'readout soft number', 'aria-live': 'polite' });
    this.below = element('div');
    this.caption = element('p', { class: 'caption' });
    this.tiles = element('div', { class: 'tiles' });
    const colours = [0, 51, 102, 153, 204, 255].map((i) => `rgb(${MAPS.heat[i].join(' ')})`);
    this.ramp.style.background = `linear-gradient(to right, ${colours.join(', ')})`;
    this.legend = element('div', { class: 'legend' }, element('span', { class: 'soft' }, '0'), this.ramp, this.high);
    this.node = element(
      'section',
      { class: 'card panel' },
      data.views.length > 1 ? this.choice : null,
      element('div', {}, element('div', { class: 'stage' }, this.canvas), this.legend, this.readout),
      element('div', {}, this.below, this.caption, this.tiles),
    );
    this.listen();
  }

  listen() {
    const place = (event) => {
      const box = this.canvas.getBoundingClientRect();
      const share = (at, size) => clamp(at / size, 0, 0.9999);
      return { u: share(event.clientX - box.left, box.width), v: share(event.clientY - box.top, box.height) };
    };
    this.canvas.addEventListener('pointermove', (event) => {
      if (!this.state.held || event.buttons) this.changed({ ...place(event), token: null });
    });
    this.canvas.addEventListener('pointerdown', (event) => {
      const at = place(event);
      const same = this.state.held && this.state.token === null && this.cellOf(at) === this.cellOf(this.state);
      this.changed({ ...at, token: null, held: event.pointerType === 'touch' ? false : !same });
    });
  }

  get view() {
    return this.data.views[this.index];
  }

  cellOf(at) {
    const [height, width] = this.view.grid;
    return Math.floor(at.v * height) * width + Math.floor(at.u * width);
  }

  async choose(index) {
    this.index = index;
    this.choice.value = index;
    await this.show();
    this.changed({});
  }

  // load what belongs to the chosen image, then draw; a later choice overtakes an earlier one
  async show() {
    const [view, token] = [this.view, (this.token += 1)];
    const key = `${this.index}/${this.state.image}`;
    const image = view.images[this.state.image];
    if (!this.cache.has(key)) this.cache.set(key, Promise.all([Rows.of(image, view), pictureOf(image.picture)]));
    const [rows, picture] = await this.cache.get(key);
    if (token !== this.token) return;
    this.loaded = { view, image, rows, picture };
    this.below.replaceChildren(...this.details());
    this.buildTiles();
    this.draw();
  }

  details() {
    const { image } = this.loaded;
    if (image.predictions) return predictionList(image);
    return pixelDetails(image, this.view);
  }

  // a row per layer, or a column per layer where there are more layers than heads
  buildTiles() {
    const { rows } = this.loaded;
    const layers = Array.from({ length: rows.layers }, (_, i) => ({ layer: i, name: String(i + 1) }));
    const heads = Array.from({ length: rows.heads + 1 }, (_, i) => ({ head: i - 1, name: i ? String(i) : 'mean' }));
    const wide = layers.length > heads.length;
    const [down, across] = wide ? [heads, layers] : [layers, heads];
    this.tiles.style.gridTemplateColumns = `${wide ? 2 : 1.1}rem repeat(${across.length}, minmax(0, 1fr))`;
    this.tiles.style.maxWidth = `${5 * across.length + 2}rem`;
    const way = wide ? 'a column per layer, a row per head' : 'a row per layer, a column per head';
    this.caption.textContent = `All heads from there: ${way}, each on its own scale`;
    const label = (one) => element('span', { class: 'name' }, one.name);
    this.tiles.replaceChildren(element('span'), ...across.map(label));
    this.buttons = [];
    for (const one of down) {
      this.tiles.append(label(one), ...across.map((other) => this.tile({ ...one, ...other })));
    }
  }

  tile({ layer, head }) {
    const canvas = element('canvas');
    const label = `layer ${layer + 1}, ${head < 0 ? 'mean of the heads' : `head ${head + 1}`}`;
    const act = () => this.changed({ layer, head });
    const button = element('button', { type: 'button', title: label, 'aria-label': label, onclick: act }, canvas);
    this.buttons.push({ layer, head, canvas, button });
    return button;
  }

  // the row that is asked for: of a token before the grid, or of the stored patch nearest to the place
  query() {
    const { view, state } = this;
    if (state.token !== null && state.token < view.prefix.length) return { query: state.token, name: view.prefix[state.token] };
    const [height, width] = view.grid;
    return nearestQuery(view, { y: Math.floor(state.v * height), x: Math.floor(state.u * width) });
  }

  draw() {
    if (!this.loaded || this.loaded.view !== this.view) return;
    const { rows } = this.loaded;
    const at = this.query();
    const layer = Math.min(this.state.layer, rows.layers - 1);
    const head = Math.min(this.state.head, rows.heads - 1);
    const row = rows.row(layer, head, at.query);
    this.shown = { layer, head, query: at.query, row };
    this.drawPicture(row, at);
    this.tell(row, at, layer, head);
    for (const tile of this.buttons) {
      const own = rows.row(tile.layer, tile.head, at.query);
      paintRow(tile.canvas, own, this.view, largestOnGrid(own, this.view));
      tile.button.setAttribute('aria-pressed', tile.layer === layer && tile.head === head);
    }
  }

  drawPicture(row, at) {
    const [height, width] = this.view.grid;
    const { picture } = this.loaded;
    const size = 640;
    const [W, H] = [size, Math.round((size * picture.naturalHeight) / picture.naturalWidth)];
    if (this.canvas.width !== W || this.canvas.height !== H) Object.assign(this.canvas, { width: W, height: H });
    const context = this.canvas.getContext('2d');
    const mix = this.state.mix;
    context.imageSmoothingEnabled = picture.naturalWidth > 64;
    context.filter = `grayscale(${mix}) brightness(${1 - 0.3 * mix})`;
    context.drawImage(picture, 0, 0, W, H);
    context.filter = 'none';
    const high = largestOnGrid(row, this.view);
    const first = this.view.prefix.length;
    const [cellW, cellH] = [W / width, H / height];
    for (let j = 0; j < height * width; j += 1) {
      const share = high > 0 ? Math.max(0, row[first + j] / high) : 0;
      context.globalAlpha = mix * (0.4 + 0.6 * Math.sqrt(share));
      context.fillStyle = `rgb(${colourOf('heat', share).join(' ')})`;
      const [y, x] = [Math.floor(j / width), j % width];
      const [left, top] = [Math.round(x * cellW), Math.round(y * cellH)]; // whole pixels: no seams, no overlaps
      context.fillRect(left, top, Math.round((x + 1) * cellW) - left, Math.round((y + 1) * cellH) - top);
    }
    context.globalAlpha = 1;
    this.drawMarks(context, at, cellW, cellH);
  }

  drawMarks(context, at, cellW, cellH) {
    const { view } = this;
    if (view.rows.length * view.columns.length < view.grid[0] * view.grid[1]) {
      context.fillStyle = 'rgb(255 255 255 / 70%)';
      for (const y of view.rows) for (const x of view.columns) context.fillRect((x + 0.5) * cellW - 1.5, (y + 0.5) * cellH - 1.5, 3, 3);
    }
    if (at.name) return;
    const [x, y] = [at.x * cellW, at.y * cellH];
    for (const [colour, width, inset] of [['#000', 6, 1], ['#5ff2d0', 3, 1]]) {
      context.strokeStyle = colour;
      context.lineWidth = width;
      context.strokeRect(x + inset, y + inset, cellW - 2 * inset, cellH - 2 * inset);
    }
  }

  tell(row, at, layer, head) {
    const { view } = this;
    const high = largestOnGrid(row, view);
    this.high.textContent = percent(high);
    const unit = this.data.pixel ? 'pixel' : 'patch';
    const from = at.name ? at.name : `${unit} in row ${at.y + 1}, column ${at.x + 1}`;
    const which = `layer ${layer + 1}, ${head < 0 ? 'mean of the heads' : `head ${head + 1}`}`;
    const { patches, distance } = spread(row, view, at.name ? { y: 0, x: 0 } : at);
    const parts = [`spread over ${short(Number(patches.toPrecision(3)))} of ${row.length}`];
    if (!at.name) parts.push(`mean distance ${distance.toFixed(1)}`);
    view.prefix.forEach((name, j) => parts.push(`${percent(row[j])} on the ${name}`));
    this.readout.replaceChildren(element('b', {}, `From the ${from}`), element('br'), [which, ...parts].join(' · '));
  }
}

async function pictureOf(url) {
  const picture = new Image();
  picture.src = url;
  await picture.decode();
  return picture;
}

function predictionList(image) {
  const caption = image.target === null ? 'Predictions' : `Predictions; it is ${image.target}`;
  const lines = image.predictions.map((one) => {
    const fill = element('div', { class: 'fill' });
    fill.style.width = `${100 * one.p}%`;
    return element(
      'li',
      { class: one.right ? 'right' : null },
      element('span', { class: 'label', title: one.label }, one.label),
      element('div', { class: 'track' }, fill),
      element('span', { class: 'share number' }, percent(one.p)),
    );
  });
  return [element('p', { class: 'caption' }, caption), element('ol', { class: 'predictions' }, ...lines)];
}

// bits per byte over the image, and what the model makes of its upper half
function pixelDetails(image, view) {
  const canvas = element('canvas', { class: 'bits', 'aria-label': 'bits per byte' });
  const high = image.bits.reduce((a, b) => Math.max(a, b), 0);
  paintRow(canvas, [...view.prefix.map(() => 0), ...image.bits], view, high);
  const mean = image.bits.reduce((a, b) => a + b, 0) / image.bits.length;
  const url = canvas.toDataURL();
  const figure = (src, text) => element('figure', {}, element('img', { src, alt: text }), element('figcaption', {}, text));
  return [
    element('p', { class: 'caption' }, `Bits per byte, dark 0 to light ${high.toFixed(1)}: ${mean.toFixed(3)} on average`),
    element('div', { class: 'strip', id: 'bits' }, figure(image.picture, 'image'), figure(url, 'bits')),
    element('p', { class: 'caption' }, 'The lower half, drawn by the model after the upper one'),
    element('div', { class: 'strip' }, figure(image.picture, 'image'), ...image.completions.map((src, i) => figure(src, `drawn ${i + 1}`))),
  ];
}
