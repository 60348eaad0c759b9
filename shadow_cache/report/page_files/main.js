// The page: which graph is open, search, keys, light and dark.

let drawing = null, stages = null, opened = null;
byId('times').append(...timesOf(report.timeline));
const timeline = timelineOf(report.timeline);

function openGraph(id, scroll = false) {
  if (!graphIds.includes(id)) return;
  if (opened !== id) {
    opened = id;
    byId('which').value = id;
    const graph = graphOf(id);
    byId('graph-facts').textContent = shown(graph.facts.map(([name, value]) => `${name} ${value}`).join(' · '));
    byId('graph-note').textContent = graph.note;
    byId('graph-note').hidden = !graph.note;
    stages = new Stages(graph, (nodes) => drawing && drawing.show(nodes));
    let choosing = false;
    drawing = graph.nodes.length ? new Drawing(graph, (node) => {
      if (choosing) return;
      choosing = true;
      stages.node(node);
      choosing = false;
    }) : null;
    if (!drawing) byId('canvas').replaceChildren();
    byId('steps').replaceChildren(...stepsOf(graph, (step) => stages.step(step)));
    byId('memory').replaceChildren(...memoryOf(graph, (line) => stages.line(1, line)));
    byId('variants').replaceChildren(...variantsOf(graph));
  }
  if (scroll) byId('graph').scrollIntoView();
}

// ---- search -----------------------------------------------------------------------------------------------------------

const MOST_FOUND = 60;

function search(text) {
  const wanted = text.toLowerCase();
  const found = [];
  let total = 0;
  const see = (kind, words, open) => {
    if (!words || !words.toLowerCase().includes(wanted)) return;
    total++;
    if (found.length < MOST_FOUND) found.push({ kind, words, open });
  };
  report.timeline.events.forEach((event, index) => see('timeline', [event.title, ...event.reasons.map((reason) => reason.text)].join('; '), () => {
    byId('misses').scrollIntoView();
    timeline.choose(index);
  }));
  for (const id of [opened, ...graphIds.filter((each) => each !== opened)].filter(Boolean)) {
    const graph = graphOf(id);
    see('graph', graph.title, () => openGraph(id, true));
    for (const node of graph.nodes) {
      see('node', [`#${node.index} ${node.name}`, node.parameter, node.module, node.source].filter(Boolean).join('  '), () => {
        openGraph(id);
        byId('canvas').scrollIntoView({ block: 'center' });
        drawing.go(node.index);
      });
    }
    graph.steps.forEach((step, index) => see('region', `${step.title}: ${step.detail}`, () => { openGraph(id); stages.step(index); byId('steps-title').scrollIntoView(); }));
    graph.stages.forEach((stage, at) => stage.lines.forEach((line, index) => see(stage.title.toLowerCase(), line.text, () => {
      openGraph(id);
      byId('stages').scrollIntoView({ block: 'center' });
      stages.line(at, index, true);
    })));
  }
  return { found, total };
}

const field = byId('search'), results = byId('found');
let hits = [], selected = -1, waiting = 0;

function closeSearch() {
  clearTimeout(waiting);
  waiting = 0;
  results.hidden = true;
  field.setAttribute('aria-expanded', 'false');
  field.removeAttribute('aria-activedescendant');
  selected = -1;
}

function showSearch() {
  clearTimeout(waiting);
  waiting = 0;
  const text = field.value.trim();
  if (text.length < 2) { closeSearch(); return; }
  const { found, total } = search(text);
  hits = found;
  selected = -1;
  const rows = found.map((each, index) => el('div', { role: 'option', id: `found-${index}`, 'aria-selected': 'false',
    onmousedown: (event) => { event.preventDefault(); take(index); } }, el('span', {}, each.kind), el('span', {}, shown(clip(each.words.trim(), 300)))));
  const told = total > found.length ? `${count(total)} found; the first ${found.length} are shown` : total ? `${count(total)} found` : `Nothing contains “${shown(clip(text, 60))}”.`;
  results.replaceChildren(el('p', { role: 'status' }, told), ...rows);
  results.hidden = false;
  field.setAttribute('aria-expanded', 'true');
}

function select(index) {
  if (!hits.length) return;
  selected = (index + hits.length) % hits.length;
  results.querySelectorAll('[role="option"]').forEach((row, at) => {
    row.setAttribute('aria-selected', at === selected);
    if (at === selected) row.scrollIntoView({ block: 'nearest' });
  });
  field.setAttribute('aria-activedescendant', `found-${selected}`);
}

function take(index) {
  const hit = hits[index];
  closeSearch();
  if (hit) hit.open();
}

field.addEventListener('input', () => { clearTimeout(waiting); waiting = setTimeout(showSearch, 120); });
field.addEventListener('focus', () => { if (field.value.trim().length > 1) showSearch(); });
field.addEventListener('blur', closeSearch);
field.addEventListener('keydown', (event) => {
  if (waiting && ['ArrowDown', 'ArrowUp', 'Enter'].includes(event.key)) showSearch();  // of what is typed by now
  if (event.key === 'ArrowDown') select(selected + 1);
  else if (event.key === 'ArrowUp') select(selected - 1);
  else if (event.key === 'Enter') { if (results.hidden) showSearch(); take(Math.max(selected, 0)); }
  else if (event.key === 'Escape') { if (results.hidden) field.blur(); else closeSearch(); }
  else return;
  event.preventDefault();
});

// ---- light and dark, keys ---------------------------------------------------------------------------------------------

function turn() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
  root.dataset.theme = dark ? 'light' : 'dark';
}

const dialog = byId('keys-dialog');
byId('theme').addEventListener('click', turn);
byId('keys').addEventListener('click', () => dialog.showModal());
byId('keys-close').addEventListener('click', () => dialog.close());

document.addEventListener('keydown', (event) => {
  if (event.altKey || event.ctrlKey || event.metaKey || dialog.open) return;
  if (event.target.closest('input, select, textarea')) return;
  const section = ['overview', 'timeline', 'graph', 'misses', 'structures'][Number(event.key) - 1];
  const at = graphIds.indexOf(opened);
  if (event.key === '/') { field.focus(); field.select(); }
  else if (event.key === '?') dialog.showModal();
  else if (event.key === 't') turn();
  else if (section) {
    byId(section).scrollIntoView();
    byId(section).setAttribute('tabindex', -1);
    byId(section).focus({ preventScroll: true });
  } else if (event.key === '[' && at > 0) openGraph(graphIds[at - 1], true);
  else if (event.key === ']' && at < graphIds.length - 1) openGraph(graphIds[at + 1], true);
  else return;
  event.preventDefault();
});

if (graphIds.length) {
  byId('which').addEventListener('change', (event) => openGraph(event.target.value));
  document.querySelectorAll('[data-graph]').forEach((button) => button.addEventListener('click', () => openGraph(button.dataset.graph, true)));
  openGraph(graphIds[0]);
}
document.documentElement.dataset.ready = 'yes';
