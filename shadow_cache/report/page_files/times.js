// Milliseconds of each backward, with eager's median as a line.

function timesOf(timeline) {
  const took = timeline.took.map(([number, count, ms, outcome]) => ({ number, count, ms, outcome }));
  const { eager } = timeline;
  if (!took.length) return [el('p', { class: 'note' }, report.of === 'store' ? 'The cache on disk keeps no times of backwards: the report of a session has them.' : 'No times are recorded yet.')];
  const milliseconds = (ms) => seconds(ms / 1e3);
  const middle = (values) => [...values].sort((one, other) => one - other)[Math.floor(values.length / 2)];
  const hits = took.filter((each) => each.outcome === 'hit').map((each) => each.ms);
  // What compiles takes a thousand times as long: the scale is for what comes again.
  const usual = Math.max(middle(hits.length ? hits : took.map((each) => each.ms)), eager || 0);
  const top = Math.min(Math.max(...took.map((each) => each.ms), eager || 0) * 1.08, 2.5 * usual);
  const HIGH = 150, TOP = 14, LEFT = 64, GAP = 46;
  const gaps = took.map((each, index) => (index ? each.number - each.count - took[index - 1].number : each.number - each.count));
  const parts = took.reduce((total, one) => total + Math.min(one.count, 40), 0);
  const many = gaps.filter((gap) => gap > 0).length;
  const wide = Math.max(byId('times').clientWidth - 30, 320);
  const each = Math.max(1.5, Math.min(16, (wide - LEFT - 12 - Math.min(many, 8) * GAP) / parts));
  const y = (ms) => TOP + HIGH * (1 - Math.min(ms, top) / top);
  const picture = svg('svg', { role: 'img', height: TOP + HIGH + 26,
    'aria-label': `Milliseconds of ${plural(took.length, 'backward')}${eager === null ? '' : `; the median of eager's is ${milliseconds(eager)}`}` });
  for (const part of [0, 0.5, 1]) picture.append(svg('line', { class: part ? 'axis' : 'axis base', x1: LEFT, x2: '100%', y1: y(part * top), y2: y(part * top) }),
    svg('text', { x: LEFT - 6, y: y(part * top) + 4, 'text-anchor': 'end' }, milliseconds(part * top)));
  let x = LEFT + 4, last = 0, drawn = '';
  const marks = [];
  took.forEach((one, index) => {
    if (gaps[index] > 0) {
      marks.push(svg('text', { x: x + GAP / 2, y: TOP + HIGH - 6, 'text-anchor': 'middle' }, `+${count(gaps[index])}`, svg('title', {}, `${plural(gaps[index], 'backward')} whose time is not kept`)));
      x += GAP;
    }
    const size = each * Math.min(one.count, 40), right = x + Math.max(size - (each > 4 ? 1.5 : 0), 1);
    if (one.outcome === 'hit' && one.ms <= top && each <= 4) drawn += `M${x.toFixed(1)},${TOP + HIGH}V${y(one.ms).toFixed(1)}`;
    else {
      const title = svg('title', {}, `#${one.count > 1 ? `${count(one.number - one.count + 1)} to ` : ''}${count(one.number)} ${OUTCOMES[one.outcome] || one.outcome}: ${milliseconds(one.ms)}${one.count > 1 ? ' each, in the mean' : ''}`);
      marks.push(svg('rect', { class: `cost ${one.outcome}`, x, y: y(one.ms), width: right - x, height: TOP + HIGH - y(one.ms) }, title));
      if (one.ms > top) marks.push(svg('path', { class: `cost ${one.outcome}`, d: `M${(x + right) / 2 - 5},${TOP} l5,-9 l5,9 z` }, svg('title', {}, title.textContent)));
    }
    x += size;
    last = one.number;
  });
  if (drawn) picture.append(svg('path', { class: 'hits', d: drawn, 'stroke-width': each * 0.8 }));
  picture.append(...marks, svg('text', { x: LEFT + 4, y: TOP + HIGH + 18 }, `backward ${count(took[0].number - took[0].count + 1)}`),
    svg('text', { x: Math.max(x, LEFT + 190), y: TOP + HIGH + 18, 'text-anchor': 'end' }, `backward ${count(last)}`));
  if (eager !== null) picture.append(svg('line', { class: 'eager', x1: LEFT, x2: '100%', y1: y(eager), y2: y(eager) }));
  picture.setAttribute('width', Math.max(x + 12, LEFT + 200));
  const legend = el('div', { class: 'legend' });
  for (const name of new Set(took.map((each) => each.outcome))) {
    const own = took.filter((each) => each.outcome === name && each.ms).map((each) => each.ms);
    legend.append(el('span', {}, el('i', { class: `c-${name}` }), `${OUTCOMES[name] || name}, median ${milliseconds(middle(own))}`));
  }
  legend.append(el('span', {}, ...(eager === null ? ["eager's time is not known"] : [el('i', { class: 'c-eager' }), `eager, median ${milliseconds(eager)}`])));
  if (took.some((each) => each.ms > top)) legend.append(el('span', {}, `triangle: took more than ${milliseconds(top)}`));
  return [el('div', { class: 'scroll' }, picture), legend];
}
