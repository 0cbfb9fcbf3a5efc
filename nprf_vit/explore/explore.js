// The page: one state, drawn by one or two panels; everything that changes it goes through `change`.

const data = readData();
const state = { image: 0, u: 0.5, v: 0.5, token: null, layer: 0, head: -1, mix: 0.8, held: false };
const panels = [];

function change(part) {
  Object.assign(state, part);
  byId('layer').value = state.layer;
  byId('head').value = state.head;
  byId('pin').setAttribute('aria-pressed', state.held);
  for (const button of byId('tokens').children) button.setAttribute('aria-pressed', Number(button.dataset.token) === state.token);
  for (const panel of panels) panel.draw();
}

const most = (name) => Math.max(...data.views.map((view) => view.images[0][name]));
const layers = most('layers');
const heads = most('heads');

// by one patch of the first panel's grid
function move(dy, dx) {
  const [height, width] = panels[0].view.grid;
  const step = (share, size, by) => (clamp(Math.floor(share * size) + by, 0, size - 1) + 0.5) / size;
  const { rows, columns } = panels[0].view;
  const stride = (stored) => (stored.length > 1 ? stored[1] - stored[0] : 1);
  change({ v: step(state.v, height, dy * stride(rows)), u: step(state.u, width, dx * stride(columns)), token: null, held: true });
}

function chooseImage(index) {
  state.image = (index + data.images.length) % data.images.length;
  [...byId('images').children].forEach((button, i) => button.setAttribute('aria-pressed', i === state.image));
  return Promise.all(panels.map((panel) => panel.show()));
}

function fillControls() {
  for (let i = 0; i < layers; i += 1) byId('layer').append(element('option', { value: i }, String(i + 1)));
  byId('head').append(element('option', { value: -1 }, 'mean'));
  for (let i = 0; i < heads; i += 1) byId('head').append(element('option', { value: i }, String(i + 1)));
  byId('layer').addEventListener('change', (event) => change({ layer: Number(event.target.value) }));
  byId('head').addEventListener('change', (event) => change({ head: Number(event.target.value) }));
  byId('mix').addEventListener('input', (event) => change({ mix: event.target.value / 100 }));
  byId('pin').addEventListener('click', () => change({ held: !state.held }));
  byId('theme').addEventListener('click', () => theme.toggle());
  const names = data.pixel ? [] : data.views.map((view) => view.prefix).reduce((a, b) => (b.length > a.length ? b : a), []);
  names.forEach((name, i) => {
    const act = () => change({ token: state.token === i ? null : i, held: true });
    byId('tokens').append(element('button', { type: 'button', 'data-token': i, 'aria-pressed': false, onclick: act }, name));
  });
}

function fillImages() {
  if (data.images.length < 2) return;
  data.images.forEach((image, i) => {
    const kind = image.thumbnail.startsWith('data:image/jpeg') ? 'photo' : null;
    const picture = element('img', { src: image.thumbnail, alt: image.name, class: kind });
    const button = element('button', { type: 'button', title: image.name, 'aria-pressed': i === 0, onclick: () => chooseImage(i) }, picture);
    byId('images').append(button);
  });
}

async function start() {
  byId('subtitle').textContent = data.models.map((model) => model.title).join(' · ');
  fillControls();
  fillImages();
  const second = data.views.findIndex((view, i) => i > 0 && (data.models.length < 2 || view.model > 0));
  for (const index of second > 0 ? [0, second] : [0]) {
    const panel = new Panel(data, state, index, change);
    panel.choice.value = index;
    panels.push(panel);
    byId('panels').append(panel.node);
  }
  onKey({
    ArrowUp: () => move(-1, 0),
    ArrowDown: () => move(1, 0),
    ArrowLeft: () => move(0, -1),
    ArrowRight: () => move(0, 1),
    '[': () => change({ layer: Math.max(0, state.layer - 1) }),
    ']': () => change({ layer: Math.min(layers - 1, state.layer + 1) }),
    ',': () => change({ head: Math.max(-1, state.head - 1) }),
    '.': () => change({ head: Math.min(heads - 1, state.head + 1) }),
    a: () => change({ head: -1 }),
    n: () => chooseImage(state.image + 1),
    p: () => change({ held: !state.held }),
    t: () => theme.toggle(),
  });
  await chooseImage(0);
  change({});
  await showBiases(data);
  document.body.dataset.ready = 'yes'; // for whoever waits for the page
}

start();
