// Curves of all runs over each other: losses, the metric of the task, learning rate, speed.

const view = { hidden: new Set(), byStep: false, log: false };

const colourOfRun = (index) => LINES[index % LINES.length];

function shownRuns() {
  return data.runs.map((run, index) => ({ run, index })).filter(({ index }) => !view.hidden.has(index));
}

// [x, y] of a column of the table of epochs, where it has a value
function epochPoints(run, name) {
  const x = view.byStep ? run.epochs.step : run.epochs.epoch;
  return (run.epochs[name] || []).map((y, i) => [x[i], y]).filter((point) => point[1] !== null);
}

function stepPoints(run, name) {
  const perEpoch = run.epochs.step[0] / run.epochs.epoch[0];
  const x = (run.steps.step || []).map((step) => (view.byStep ? step : step / perEpoch));
  return (run.steps[name] || []).map((y, i) => [x[i], y]).filter((point) => point[1] !== null && point[0] !== null);
}

function ending(run, suffix) {
  return Object.keys(run.epochs).filter((name) => name.endsWith(suffix) && name !== 'train_loss');
}

// one figure: name of the chart, and for each run its lines
function charts() {
  const label = (run, name) => (data.several ? `${run.name}, ${name}` : name);
  const lines = (make) => shownRuns().flatMap(({ run, index }) => make(run).map((one, i) => ({
    ...one,
    name: label(run, one.name),
    colour: data.several ? colourOfRun(index) : LINES[i % LINES.length],
    dash: data.several && i > 0,
    faint: data.several && i > 1,
  })));
  const loss = lines((run) => [
    { name: 'training', points: run.steps.step && run.steps.step.length > 1 ? stepPoints(run, 'loss') : epochPoints(run, 'train_loss') },
    ...ending(run, 'loss').map((name) => ({ name: name === 'loss' ? 'validation' : 'validation, EMA', points: epochPoints(run, name) })),
  ]);
  const metrics = new Map();
  for (const { run } of shownRuns()) metrics.set(run.metric.label, run.metric.name);
  const found = [{ title: 'Loss', log: view.log, series: loss }];
  for (const [title, suffix] of metrics) {
    found.push({ title, series: lines((run) => (run.metric.name === suffix ? ending(run, suffix) : []).map((name) => ({ name, points: epochPoints(run, name) }))) });
  }
  found.push({ title: 'Learning rate', series: lines((run) => [{ name: 'lr', points: run.steps.step && run.steps.step.length > 1 ? stepPoints(run, 'lr') : epochPoints(run, 'lr') }]) });
  found.push({ title: 'Images per second', series: lines((run) => [{ name: 'per epoch', points: epochPoints(run, 'images_per_s') }]) });
  found.push({ title: 'Share of the time spent waiting for data', series: lines((run) => [{ name: 'per epoch', points: epochPoints(run, 'data_wait') }]) });
  return found.map((chart) => ({ ...chart, series: chart.series.filter((one) => one.points.length) })).filter((chart) => chart.series.length);
}

function keyOf(one, value = '') {
  const line = element('i', { class: one.dash ? 'dash' : null });
  line.style.background = one.colour;
  line.style.setProperty('--line-colour', one.colour);
  return element('span', { class: 'number' }, line, value ? `${one.name} ${value}` : one.name);
}

function figureOf(chart, x) {
  const keys = element('p', { class: 'keys' });
  const rest = () => keys.replaceChildren(...chart.series.map((one) => keyOf(one)));
  const told = (at, found) => {
    if (at === null) return rest();
    const values = new Map(found.map((one) => [one.name, one.point[1]]));
    keys.replaceChildren(element('b', {}, `${x} ${short(at)}`), ...chart.series.map((one) => keyOf(one, values.has(one.name) ? short(values.get(one.name)) : '–')));
    return null;
  };
  rest();
  const svg = lineChart(chart.series, { x, y: chart.title, log: chart.log, zero: true, told });
  return element('figure', {}, element('figcaption', {}, chart.title), svg, keys);
}

function drawCurves() {
  const x = view.byStep ? 'step' : 'epoch';
  byId('axis').textContent = view.byStep ? 'over steps' : 'over epochs';
  byId('log').setAttribute('aria-pressed', view.log);
  byId('curves').replaceChildren(...charts().map((chart) => figureOf(chart, x)));
}
