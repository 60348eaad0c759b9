// What all parts of the page use. Text of users goes into text nodes and attributes here, never into markup.

const SVG = 'http://www.w3.org/2000/svg';
const byId = (id) => document.getElementById(id);
const report = JSON.parse(byId('report-data').textContent);
const parsedGraphs = new Map();

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? '' : value);
  }
  for (const child of children) if (child !== null && child !== undefined) node.append(child);
  return node;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

// Control characters, those that turn the direction of text, and halves of pairs are shown as escapes.
const unseen = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;
const shown = (text) => String(text).replace(unseen, (each) => '\\u' + each.charCodeAt(0).toString(16).padStart(4, '0'));
const clip = (text, most) => (text.length <= most ? text : text.slice(0, most - 1) + '…');
const clipMiddle = (text, most) =>
  text.length <= most ? text : text.slice(0, Math.ceil((most - 1) / 2)) + '…' + text.slice(text.length - Math.floor((most - 1) / 2));

const count = (number) => number.toLocaleString('en-US');
const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? '' : 's'}`;
function seconds(value) {
  if (value === 0) return '0';
  if (value < 0.9995e-3) return `${Math.round(value * 1e6)} µs`;
  if (value < 0.00995) return `${(value * 1e3).toFixed(2)} ms`;
  if (value < 0.9995) return `${(value * 1e3).toFixed(value < 0.0995 ? 1 : 0)} ms`;
  if (value < 99.95) return `${value.toFixed(1)} s`;
  return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}
function bytes(value) {
  for (const unit of ['B', 'kB', 'MB', 'GB']) {
    if (value < 999.95) return `${unit === 'B' ? value : value.toFixed(1)} ${unit}`;
    value /= 1000;
  }
  return `${value.toFixed(1)} TB`;
}
const date = (when) => new Date(when * 1000).toISOString().replace('T', ' ').slice(0, 19) + ' UTC';

const graphIds = [...document.querySelectorAll('#which option')].map((option) => option.value);

function graphOf(id) {
  // Parsed when it is first shown or searched: a page with many graphs opens as fast as one with few.
  if (!parsedGraphs.has(id)) {
    const parsed = JSON.parse(byId(`graph-data-${graphIds.indexOf(id)}`).textContent);
    parsed.nodes = parsed.nodes.map(([name, parameter, source, module, edges, step], index) =>
      ({ index, name, parameter, source, module, edges, step }));
    for (const stage of parsed.stages) {
      stage.lines = stage.lines.map(([text, links, node]) => ({ text, links, node }));
      stage.blocks = stage.blocks.map(([step, first, size]) => ({ step, first, size }));
    }
    parsedGraphs.set(id, parsed);
  }
  return parsedGraphs.get(id);
}

function definitions(pairs) {
  return el('dl', {}, ...pairs.flatMap(([name, value]) => [el('dt', {}, shown(name)), el('dd', {}, shown(value))]));
}

function meter(parts, most) {
  // Bars of one scale; each part is a class and a value.
  const height = 8 * parts.length;
  const picture = svg('svg', { viewBox: `0 0 100 ${height}`, preserveAspectRatio: 'none', 'aria-hidden': 'true' },
    svg('rect', { class: 'back', width: 100, height }));
  parts.forEach(([name, value], index) =>
    picture.append(svg('rect', { class: name, y: 8 * index, width: Math.max((100 * value) / most, 0.5), height: 8 })));
  return picture;
}
