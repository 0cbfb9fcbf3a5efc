// The page of a training report.

const data = readData();

function drawRuns() {
  if (!data.several) return;
  data.runs.forEach((run, index) => {
    const line = element('i');
    line.style.background = colourOfRun(index);
    const act = () => {
      if (!view.hidden.delete(index)) view.hidden.add(index);
      button.setAttribute('aria-pressed', !view.hidden.has(index));
      drawCurves();
    };
    const button = element('button', { type: 'button', 'aria-pressed': true, title: run.model, onclick: act }, line, run.name);
    byId('runs').append(button);
  });
}

function turn(name) {
  view[name] = !view[name];
  drawCurves();
}

byId('title').textContent = data.several ? `${data.runs.length} runs` : data.runs[0].name;
byId('subtitle').textContent = [...new Set(data.runs.map((run) => run.model))].join(' · ');
document.body.classList.toggle('several', data.several);
byId('theme').addEventListener('click', () => theme.toggle());
byId('axis').addEventListener('click', () => turn('byStep'));
byId('log').addEventListener('click', () => turn('log'));
onKey({ t: () => theme.toggle(), x: () => turn('byStep'), l: () => turn('log') });
drawRuns();
drawGlance();
drawCurves();
drawBias();
drawImages();
drawSettings();
drawFaults();
document.body.dataset.ready = 'yes'; // for whoever waits for the page
