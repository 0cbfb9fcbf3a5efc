// Tables, pictures and the bias of the runs.

function table(head, rows, kind = null) {
  const cells = (tag, values) => values.map((value) => element(tag, {}, value === null ? '–' : value));
  return element(
    'table',
    { class: kind },
    head ? element('thead', {}, element('tr', {}, ...cells('th', head))) : null,
    element('tbody', {}, ...rows.map(([first, ...rest]) => element('tr', {}, element('th', { scope: 'row' }, first), ...cells('td', rest)))),
  );
}

function drawGlance() {
  const names = [...new Set(data.runs.flatMap((run) => run.facts.map((fact) => fact.name)))];
  const value = (run, name) => (run.facts.find((fact) => fact.name === name) || { value: null }).value;
  if (!data.several) {
    const facts = data.runs[0].facts.map((fact) => element('div', {}, element('dt', {}, fact.name), element('dd', { class: 'number' }, fact.value)));
    byId('glance').append(element('dl', { class: 'tiles' }, ...facts));
    return;
  }
  const rows = names.map((name) => [name, ...data.runs.map((run) => value(run, name))]);
  byId('glance').append(table(['', ...data.runs.map((run) => run.name)], rows, 'facts number'));
}

function drawSettings() {
  byId('settings-title').textContent = data.several ? 'Where the configurations differ' : 'Configuration, where it is not at its defaults';
  const rows = data.settings.map((row) => [row.key, ...row.values]);
  const same = element('p', { class: 'soft' }, data.several ? 'They are the same.' : 'All keys have their defaults.');
  byId('settings').append(rows.length ? table(data.several ? ['', ...data.runs.map((run) => run.name)] : null, rows) : same);
}

function drawFaults() {
  const parts = data.runs.flatMap((run) => {
    const of = data.several ? ` of ${run.name}` : '';
    const found = [];
    if (run.skipped.total) {
      const rows = run.skipped.first.map((one) => [`step ${one.step}`, one.reason, one.suspects.length ? `images ${one.suspects.join(', ')}` : null]);
      found.push(element('h3', {}, `${run.skipped.total} skipped steps${of}`), table(null, rows));
    }
    if (run.bad_images.total) {
      const rows = run.bad_images.first.map((one) => [`image ${one.index}`, one.problem]);
      found.push(element('h3', {}, `${run.bad_images.total} bad images${of}`), table(null, rows));
    }
    return found;
  });
  byId('faults').append(...(parts.length ? parts : [element('p', { class: 'soft' }, 'None: every step made its update, and every image could be read.')]));
}

function hardImage(one, unit) {
  const kind = one.picture.startsWith('data:image/jpeg') ? 'photo' : null;
  const lines = one.target === null ? [] : [element('b', {}, one.target), element('br'), 'taken for ', element('span', { class: one.target === one.predicted ? null : 'wrong' }, one.predicted), ` (${percent(one.p)})`, element('br')];
  return element(
    'figure',
    {},
    element('img', { src: one.picture, alt: one.target === null ? `image ${one.index}` : `${one.target}, taken for ${one.predicted}`, class: kind }),
    element('figcaption', { class: 'number' }, ...lines, `${unit} ${short(one.loss)}, image ${one.index}`),
  );
}

function drawImages() {
  const runs = data.runs.filter((run) => run.hard_images && run.hard_images.worst.length);
  byId('images-card').hidden = !runs.length;
  for (const run of runs) {
    const { worst, confused, unit, model } = run.hard_images;
    const of = (data.several ? ` of ${run.name}` : '') + (model ? ', by the moving average' : '');
    byId('images').append(element('h3', {}, `Worst${of}`), element('div', { class: 'gallery' }, ...worst.map((one) => hardImage(one, unit))));
    if (!confused.length) continue;
    const pair = (one) => {
      const figure = hardImage(one.case, unit);
      figure.querySelector('figcaption').replaceChildren(element('b', {}, one.target), ' taken for ', element('span', { class: 'wrong' }, one.predicted), element('br'), one.count === 1 ? 'once' : `${one.count} times`);
      return figure;
    };
    byId('images').append(element('h3', {}, `Most confused${of}`), element('div', { class: 'gallery' }, ...confused.map(pair)));
  }
}

// every head of a table, each with a line per epoch
function drawBias() {
  const runs = data.runs.filter((run) => run.biases.length);
  byId('bias-card').hidden = !runs.length;
  if (!runs.length) return;
  const choose = (values, label, act) => {
    const select = element('select', { 'aria-label': label, onchange: () => act(Number(select.value)) });
    values.forEach((value, i) => select.append(element('option', { value: i }, value)));
    return select;
  };
  let [run, name] = [runs[0], null];
  const title = (key) => {
    const layer = key.match(/\.(\d+)\./);
    return layer ? `layer ${Number(layer[1]) + 1}` : 'all layers';
  };
  const draw = () => {
    const lines = run.biases.filter((line) => line.tables[name]);
    const last = Math.max(...lines.map((line) => line.epoch)) || 1;
    const { heads } = lines[lines.length - 1].tables[name];
    const figures = heads.map((_, head) => {
      const series = lines.map((line) => ({
        name: `epoch ${line.epoch}`,
        colour: `rgb(${colourOf('heat', 0.28 + 0.5 * (line.epoch / last)).join(' ')})`,
        points: line.tables[name].distance.map((distance, i) => [distance, line.tables[name].heads[head][i]]),
      }));
      const svg = lineChart(series, { x: 'distance', y: 'bias', zero: true, width: 300, height: 170 });
      return element('figure', {}, element('figcaption', {}, `head ${head + 1}`), svg);
    });
    byId('bias').replaceChildren(...figures);
  };
  const tables = element('span', { class: 'switches' });
  const takeRun = (index) => {
    run = runs[index];
    const names = Object.keys(run.biases[0].tables);
    [name] = names;
    tables.replaceChildren(...(names.length > 1 ? [choose(names.map(title), 'layer', (i) => { name = names[i]; draw(); })] : []));
    draw();
  };
  if (runs.length > 1) byId('bias-switches').append(choose(runs.map((one) => one.name), 'run', takeRun));
  byId('bias-switches').append(tables);
  takeRun(0);
}
