// Of one graph: its steps with their time, its memory, its variants.

const KINDS = { region: 'region', users: 'uncompiled', leaves: 'leaves' };

function stepsOf(graph, choose) {
  const { steps } = graph;
  if (!steps.length) return [el('p', { class: 'note' }, graph.note || 'There are none.')];
  const most = Math.max(...steps.map((step) => step.seconds || 0), 1e-9);
  const list = new List({ count: steps.length, rowHeight: 28, label: 'Regions, in the order in which they run', choose, render(index, row) {
    const step = steps[index];
    const time = step.seconds === null ? el('span', { class: 'note' }, '')
      : el('span', { class: 'meter', title: `${plural(step.runs, 'run')}, the shortest ${seconds(step.least)}` },
        meter([[step.kind, step.seconds]], most), el('span', { class: 'num' }, seconds(step.seconds)));
    row.append(el('span', { class: 'num note' }, String(index)), el('span', { class: 'kind' }, el('i', { class: `c-${step.kind}` }), KINDS[step.kind] || step.kind),
      el('span', {}, shown(step.title)), el('span', { class: 'note' }, shown(step.detail)), el('span', { class: 'num' }, count(step.calls)),
      el('span', { class: 'num' }, step.nodes ? count(step.nodes) : ''), time);
  } });
  list.host.classList.add('steps');
  list.host.style.height = `${Math.min(28 * steps.length + 2, 286)}px`;
  const timed = steps.filter((step) => step.seconds !== null);
  const sum = timed.reduce((total, step) => total + step.seconds, 0);
  const heads = ['', 'kind', 'step', 'what', 'calls', 'nodes', timed.length ? `time, ${seconds(sum)} in all` : 'time: not profiled'];
  const head = el('div', { class: 'list-head steps-head', 'aria-hidden': 'true' }, ...heads.map((name, at) => el('span', { class: at === 4 || at === 5 ? 'num' : '' }, name)));
  setTimeout(() => list.draw());
  return [head, list.host];
}

function memoryOf(graph, choose) {
  const memory = graph.memory;
  if (!memory || !memory.points.length) return [el('p', { class: 'note' }, memory ? memory.note : 'Not known: nothing is compiled, or this is the report of a cache on disk.')];
  const WIDE = 1000, HIGH = 150, TOP = 14, { points } = memory;
  const total = points.map(([saved, made]) => saved + made), peak = Math.max(...total, 1), at = total.indexOf(Math.max(...total));
  const x = (index) => (points.length > 1 ? (WIDE * index) / (points.length - 1) : 0), y = (value) => TOP + HIGH * (1 - value / peak);
  const line = (values) => values.map((value, index) => `${x(index).toFixed(1)},${y(value).toFixed(1)}`).join(' ');
  const picture = svg('svg', { viewBox: `0 0 ${WIDE} ${TOP + HIGH + 8}`, preserveAspectRatio: 'none', role: 'img',
    'aria-label': `Memory over the backward: ${bytes(total[0])} at the beginning, at most ${bytes(peak)}, ${bytes(total[total.length - 1])} at the end` });
  picture.append(svg('polygon', { class: 'area-made', points: `0,${y(0)} ${line(total)} ${WIDE},${y(0)}` }),
    svg('polygon', { class: 'area-saved', points: `0,${y(0)} ${line(points.map(([saved]) => saved))} ${WIDE},${y(0)}` }));
  memory.steps.slice(1, 60).forEach((first) => picture.append(svg('line', { class: 'axis', x1: x(first), x2: x(first), y1: TOP, y2: TOP + HIGH })));
  picture.append(svg('line', { class: 'peak', x1: 0, x2: WIDE, y1: TOP, y2: TOP, 'vector-effect': 'non-scaling-stroke' }));
  const cursor = svg('line', { class: 'cursor', y1: TOP, y2: TOP + HIGH, visibility: 'hidden', 'vector-effect': 'non-scaling-stroke' });
  picture.append(cursor);
  const told = el('p', { 'aria-live': 'polite' });
  const where = (index) => {
    const text = points[index][2] >= 0 ? graph.stages[1].lines[points[index][2]] : null;
    return text ? text.text.trim() : index ? 'between two steps' : 'the beginning';
  };
  const tell = (index) => told.replaceChildren(`${bytes(total[index])}: ${bytes(points[index][0])} saved by the forward, ${bytes(points[index][1])} made by the backward `,
    el('span', { class: 'note mono' }, shown(clip(where(index), 120))));
  let now = at;
  const move = (index) => {
    now = Math.max(0, Math.min(points.length - 1, index));
    cursor.setAttribute('x1', x(now));
    cursor.setAttribute('x2', x(now));
    cursor.setAttribute('visibility', 'visible');
    tell(now);
  };
  const place = (event) => {
    const box = picture.getBoundingClientRect();
    return Math.round(((event.clientX - box.left) / box.width) * (points.length - 1));
  };
  const host = el('div', { tabindex: 0, role: 'slider', 'aria-label': 'Place in the backward', 'aria-valuemin': 0, 'aria-valuemax': points.length - 1, 'aria-valuenow': now,
    onmousemove: (event) => move(place(event)), onclick: (event) => { move(place(event)); if (points[now][2] >= 0) choose(points[now][2]); },
    onkeydown: (event) => {
      const to = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: points.length - 1, Enter: now }[event.key];
      if (to === undefined) return;
      move(to);
      host.setAttribute('aria-valuenow', now);
      host.setAttribute('aria-valuetext', told.textContent);
      if (event.key === 'Enter' && points[now][2] >= 0) choose(points[now][2]);
      event.preventDefault();
    } }, picture);
  tell(at);
  return [el('div', { class: 'legend' }, el('span', {}, el('i', { class: 'c-saved' }), 'saved by the forward'), el('span', {}, el('i', { class: 'c-made' }), 'made by the backward'),
    el('span', {}, `at most ${bytes(peak)}`)), host, told, el('p', { class: 'note' }, memory.note)];
}

function variantsOf(graph) {
  if (!graph.variants.length) return [el('p', { class: 'note' }, 'There are none.')];
  return graph.variants.map((variant) => {
    const timing = el('div', { class: 'timing' });
    if (variant.eager !== null && variant.compiled !== null) {
      const most = Math.max(variant.eager, variant.compiled);
      for (const [name, value] of [['eager', variant.eager], ['compiled', variant.compiled]]) {
        timing.append(el('span', {}, name), el('span', { class: 'meter' }, meter([[name, value]], most), el('span', { class: 'num' }, seconds(value / 1e3))));
      }
      timing.append(el('span', {}, ''), el('span', { class: 'note' }, `medians of ${variant.samples}; eager takes ${(variant.eager / variant.compiled).toFixed(2)} times the compiled time`));
    } else timing.append(el('span', { class: 'note' }, 'eager'), el('span', { class: 'note' }, 'not timed'));
    return el('div', { class: 'variant' }, el('h4', {}, shown(variant.title)), timing,
      el('details', { class: 'more' }, el('summary', {}, 'Dependencies'), el('div', { class: 'panel' }, definitions(variant.facts))));
  });
}
