// The steps that were more than a hit: a strip of bars, a list, and what is known of the chosen one.

const OUTCOMES = { hit: 'hit', shape_miss: 'shape miss', structure_miss: 'structure miss', miss: 'miss', bypass: 'bypass' };
const BAR = 7, STRIP = 92, LEAST = 1e-4;
const broad = (event) => BAR + (event.count > 1 ? 5 * Math.log2(event.count) : 0);
const failed = (event) => event.reasons.some((reason) => reason.failed);

function timelineOf(timeline) {
  const events = timeline.events;
  const host = byId('strip');
  if (!events.length) {
    const hits = timeline.total ? timeline.total === 1 ? 'The one backward was a hit.' : `All ${count(timeline.total)} backwards were hits.` : 'Nothing is recorded.';
    host.append(el('p', { class: 'note' }, hits));
    return { choose() {} };
  }
  const groups = [];
  const list = new List({ count: events.length, rowHeight: 28, label: 'Events', choose: (index) => choose(index), render(index, row) {
    const event = events[index];
    const number = event.count > 1 ? `${count(event.number - event.count + 1)}–${count(event.number)}` : count(event.number);
    const kinds = event.reasons.map((reason) => reason.text).join('; ') || (event.compiles ? `${plural(event.compiles, 'region')} compiled` : '');
    row.append(el('span', { class: 'num' }, number),
      el('span', { class: 'kind' }, el('i', { class: `c-${event.outcome}` }), OUTCOMES[event.outcome] || event.outcome, failed(event) ? el('i', { class: 'c-failed', title: 'something failed', role: 'img', 'aria-label': ', something failed' }) : ''),
      el('span', {}, shown(event.title)), el('span', { class: 'num' }, event.cost ? seconds(event.cost) : ''),
      el('span', { class: 'note' }, shown(clip(kinds, 400))));
  } });

  function choose(index) {
    groups.forEach((group, each) => group && group.classList.toggle('is-chosen', each === index));
    mark.setAttribute('x', places[index] - 2);
    mark.setAttribute('width', broad(events[index]) + 4);
    mark.setAttribute('visibility', 'visible');
    const scroll = host.querySelector('.scroll');
    if (places[index] < scroll.scrollLeft + 20 || places[index] > scroll.scrollLeft + scroll.clientWidth - 20) {
      scroll.scrollLeft = places[index] - scroll.clientWidth / 2;
    }
    list.move(index);
    byId('event').replaceChildren(...told(events[index], timeline));
  }

  // Places: a bar for each event, and between them as much room as there were hits, on a scale of powers.
  const places = [], runs = [];
  let x = 70, last = 0;
  for (const event of events) {
    const hits = timeline.hits_between ? event.number - event.count - last : 0;
    if (hits > 0) {
      const room = 14 + 9 * Math.log2(hits + 1);
      runs.push({ x, room, hits });
      x += room;
    }
    places.push(x);
    x += broad(event) + 3;
    last = event.number;
  }
  const after = timeline.hits_between ? timeline.total - last : 0;
  if (after > 0) {
    const room = 14 + 9 * Math.log2(after + 1);
    runs.push({ x, room, hits: after });
    x += room;
  }
  const most = Math.max(...events.map((event) => event.cost), 10 * LEAST);
  const height = (cost) => (cost <= LEAST ? 3 : Math.max(3, (STRIP * Math.log10(cost / LEAST)) / Math.log10(most / LEAST)));
  const wide = Math.max(x + 16, host.clientWidth - 30);
  const picture = svg('svg', { width: wide, height: STRIP + 40, role: 'img',
    'aria-label': `${plural(events.length, 'event')}; the list below has all of them` });
  for (let cost = LEAST * 10; cost <= most; cost *= 10) {
    const y = 14 + STRIP - height(cost);
    picture.append(svg('line', { class: 'axis', x1: 62, x2: wide - 8, y1: y, y2: y }),
      svg('text', { x: 56, y: y + 4, 'text-anchor': 'end' }, seconds(cost).replace(/\.0+ /, ' ')));
  }
  const mark = svg('rect', { class: 'chosen-mark', y: 8, height: STRIP + 10, visibility: 'hidden' });
  picture.append(mark, svg('line', { class: 'axis base', x1: 62, x2: wide - 8, y1: 14.5 + STRIP, y2: 14.5 + STRIP }));
  for (const run of runs) {
    picture.append(svg('line', { class: 'run', x1: run.x + 5, x2: run.x + run.room - 8, y1: 14 + STRIP, y2: 14 + STRIP },
      svg('title', {}, plural(run.hits, 'hit'))));
    const text = run.room > 26 ? count(run.hits) : '';
    picture.append(svg('text', { x: run.x + run.room / 2 - 1, y: 30 + STRIP, 'text-anchor': 'middle' }, text));
  }
  events.forEach((event, index) => {
    const high = height(event.cost), wide = broad(event);
    const group = svg('g', { class: 'event-bar', onclick: () => choose(index) },
      svg('rect', { x: places[index] - 1, y: 8, width: wide + 2, height: STRIP + 10, fill: 'transparent' }),
      svg('rect', { class: `cost ${event.outcome}`, x: places[index], y: 14 + STRIP - high, width: wide, height: high }),
      failed(event) ? svg('circle', { class: 'failed', cx: places[index] + wide / 2, cy: 9 + STRIP - high, r: 3 }) : '',
      svg('title', {}, shown(`#${event.number} ${OUTCOMES[event.outcome] || event.outcome}, ${seconds(event.cost)}: ${event.title}`)));
    groups.push(group);
    picture.append(group);
  });
  host.append(el('div', { class: 'scroll' }, picture));
  const present = [...new Set(events.map((event) => event.outcome))];
  const legend = el('div', { class: 'legend' }, ...present.map((name) => el('span', {}, el('i', { class: `c-${name}` }),
    name === 'hit' ? 'hit with a compile or a failure' : OUTCOMES[name] || name)));
  if (events.some(failed)) legend.append(el('span', {}, el('i', { class: 'c-failed' }), 'failure: a slower way was taken'));
  if (runs.length) legend.append(el('span', {}, el('i', { class: 'c-hit' }), 'line with a number: number of hits'));
  if (timeline.left_out) legend.append(el('span', {}, `${plural(timeline.left_out, 'event')} in the middle are not kept`));
  host.append(legend);
  list.host.classList.add('events');
  list.host.style.height = `${Math.min(28 * events.length + 2, 310)}px`;
  byId('events').append(el('div', { class: 'list-head events-head', 'aria-hidden': 'true' }, ...[timeline.hits_between ? 'backward' : 'number', 'outcome', 'what', 'cost', 'reasons']
    .map((name, index) => el('span', { class: index === 0 || index === 3 ? 'num' : '' }, name))), list.host);
  list.draw();
  return { choose: (index) => { choose(index); list.show(index); } };
}

function told(event, timeline) {
  const stages = Object.entries(event.seconds).filter(([, spent]) => spent > 0);
  const facts = [['when', date(event.when)]];
  if (timeline.hits_between) facts.push(['backward', `${count(event.number)} of ${count(timeline.total)}`]);
  if (event.count > 1) facts.push(['in a row', count(event.count)]);
  if (event.compiles) facts.push(['compiled', plural(event.compiles, 'region')]);
  if (event.loads) facts.push(['from disk', plural(event.loads, 'region')]);
  if (stages.length) facts.push(['seconds', stages.map(([name, spent]) => `${name} ${seconds(spent)}`).join(', ')]);
  const parts = [el('h4', {}, shown(`${OUTCOMES[event.outcome] || event.outcome}: ${event.title}`))];
  for (const reason of event.reasons) {
    parts.push(el('p', {}, shown(reason.text)));
    if (reason.means) parts.push(el('p', { class: 'note' }, `${reason.means} ${reason.do}`));
  }
  parts.push(definitions(facts));
  if (event.graph) parts.push(el('button', { type: 'button', class: 'link', onclick: () => openGraph(event.graph, true) }, 'Show its graph'));
  return parts;
}
