// From the nodes of a tape to the boxes of a drawing: folded by module, in layers, with few crossings.

const MOST_BOXES = 44, MOST_OPENED = 44;

// Modules as a tree: { name, path, children: [in order], nodes: [indices], size, order }
function treeOf(nodes) {
  const root = { name: '', path: '', groups: new Map(), nodes: [], size: 0, order: 0 };
  for (const node of nodes) {
    let at = root;
    at.size++;
    for (const part of node.module ? node.module.split('.') : []) {
      if (!at.groups.has(part)) {
        at.groups.set(part, { name: part, path: at.path ? `${at.path}.${part}` : part, groups: new Map(), nodes: [], size: 0, order: node.index });
      }
      at = at.groups.get(part);
      at.size++;
    }
    at.nodes.push(node.index);
  }
  return root;
}

// What a group has in it: boxes for its groups and nodes, in the order of the tape.
function insideOf(group) {
  const boxes = group.run ? group.run : [
    ...[...group.groups.values()].map((each) => ({ group: each, order: each.order, size: each.size })),
    ...group.nodes.map((index) => ({ node: index, order: index, size: 1 })),
  ].map((box) => (box.group && box.size === 1 ? { node: only(box.group), order: box.order, size: 1 } : box));
  boxes.sort((one, other) => one.order - other.order);
  if (boxes.length <= MOST_BOXES) return boxes;
  const each = Math.ceil(boxes.length / Math.min(MOST_BOXES - 14, Math.ceil(boxes.length / 6)));
  const runs = [];
  for (let start = 0; start < boxes.length; start += each) {
    const run = boxes.slice(start, start + each);
    const size = run.reduce((sum, box) => sum + box.size, 0);
    if (run.length === 1) { runs.push(run[0]); continue; }
    const names = [run[0], run[run.length - 1]].map((box) => (box.group ? box.group.name : `#${box.node}`));
    const prefix = group.path && run[0].group ? `${group.path}.` : '';
    const inner = { name: `${prefix}${names[0]} … ${names[1]}`, path: group.path, run, groups: new Map(), nodes: [], size, order: run[0].order };
    runs.push({ group: inner, order: inner.order, size });
  }
  return runs;
}

function only(group) {
  return group.nodes.length ? group.nodes[0] : only([...group.groups.values()][0]);
}

function membersOf(group) {
  if (group.run) return group.run.flatMap((box) => (box.group ? membersOf(box.group) : [box.node]));
  return [...group.nodes, ...[...group.groups.values()].flatMap(membersOf)];
}

// Boxes for a view of a group: all its nodes where they are few, else its modules, with lists of layers unfolded.
function boxesOf(group) {
  if (group.size <= MOST_OPENED) return membersOf(group).sort((one, other) => one - other).map((node) => ({ node, order: node, size: 1 }));
  let boxes = insideOf(group);
  for (;;) {
    const isList = (box) => box.group && !box.group.run && !box.group.nodes.length;
    const opened = boxes.flatMap((box) => (isList(box) ? insideOf(box.group) : [box]));
    if (opened.length > MOST_OPENED || !boxes.some(isList)) return boxes.length === 1 && boxes[0].group ? boxesOf(boxes[0].group) : boxes;
    boxes = opened;
  }
}

// Edges between boxes, and to what lies outside of the view.
function joined(boxes, nodes) {
  const boxOf = new Map();
  boxes.forEach((box, index) => (box.group ? membersOf(box.group) : [box.node]).forEach((node) => boxOf.set(node, index)));
  const edges = new Map(), comes = new Map(), goes = new Map();
  const add = (map, key) => map.set(key, (map.get(key) || 0) + 1);
  for (const node of nodes) {
    const from = boxOf.get(node.index);
    for (const target of node.edges) {
      const to = boxOf.get(target);
      if (from === undefined && to !== undefined) add(comes, to);
      else if (from !== undefined && to === undefined) add(goes, from);
      else if (from !== undefined && from !== to) add(edges, `${from} ${to}`);
    }
  }
  const list = [...edges].map(([key, number]) => ({ from: Number(key.split(' ')[0]), to: Number(key.split(' ')[1]), number }));
  if (comes.size) {
    boxes.push({ outside: 'from outside', order: -1, size: 0 });
    comes.forEach((number, to) => list.push({ from: boxes.length - 1, to, number }));
  }
  if (goes.size) {
    boxes.push({ outside: 'to outside', order: Infinity, size: 0 });
    goes.forEach((number, from) => list.push({ from, to: boxes.length - 1, number }));
  }
  return list;
}

// Layers: each box below all that lead to it. Groups may lead to each other both ways; then the order of the tape counts.
function layered(boxes, edges) {
  const forward = edges.filter((edge) => { edge.back = boxes[edge.from].order >= boxes[edge.to].order; return !edge.back; });
  const order = boxes.map((_, index) => index).sort((one, other) => boxes[one].order - boxes[other].order);
  const out = boxes.map(() => []);
  forward.forEach((edge) => out[edge.from].push(edge.to));
  boxes.forEach((box) => { box.layer = 0; });
  for (const index of order) for (const to of out[index]) boxes[to].layer = Math.max(boxes[to].layer, boxes[index].layer + 1);
  // What only leads on goes down to just above where it leads, so that edges are short.
  for (const index of order.slice().reverse()) {
    const comesFrom = forward.some((edge) => edge.to === index);
    if (!comesFrom && out[index].length) boxes[index].layer = Math.min(...out[index].map((to) => boxes[to].layer)) - 1;
  }
  return forward;
}

// Places: { boxes with x, y, w, h; edges with points }
function placed(boxes, edges, widthOf) {
  const GAP_X = 22, GAP_Y = 26, HIGH = 40;
  const forward = layered(boxes, edges);
  const layers = [];
  const put = (item, layer) => { (layers[layer] = layers[layer] || []).push(item); };
  boxes.forEach((box) => { box.w = widthOf(box); box.h = HIGH; box.up = []; box.down = []; });
  boxes.slice().sort((one, other) => one.order - other.order).forEach((box) => put(box, box.layer));
  for (const edge of forward) { // through the layers between, by points that take room as boxes do
    edge.way = [boxes[edge.from]];
    for (let layer = boxes[edge.from].layer + 1; layer < boxes[edge.to].layer; layer++) {
      const point = { w: 6, h: HIGH, layer, up: [], down: [], isPoint: true };
      put(point, layer);
      edge.way.push(point);
    }
    edge.way.push(boxes[edge.to]);
    for (let at = 1; at < edge.way.length; at++) { edge.way[at - 1].down.push(edge.way[at]); edge.way[at].up.push(edge.way[at - 1]); }
  }
  for (let at = 0; at < layers.length; at++) layers[at] = layers[at] || [];
  const number = (layer) => layer.forEach((item, index) => { item.place = index; });
  layers.forEach(number);
  for (let sweep = 0; sweep < 8; sweep++) { // fewer crossings
    const down = sweep % 2 === 0;
    for (const layer of down ? layers : layers.slice().reverse()) {
      for (const item of layer) {
        const near = down ? item.up : item.down;
        item.want = near.length ? near.reduce((sum, each) => sum + each.place, 0) / near.length : item.place;
      }
      layer.sort((one, other) => one.want - other.want);
      number(layer);
    }
  }
  for (const layer of layers) {
    let x = 0;
    for (const item of layer) { item.x = x + item.w / 2; x += item.w + GAP_X; }
  }
  for (let sweep = 0; sweep < 12; sweep++) { // straighter edges
    const down = sweep % 2 === 0;
    for (const layer of down ? layers : layers.slice().reverse()) {
      const wanted = layer.map((item) => {
        const near = [...(down ? item.up : item.down)];
        return near.length ? near.reduce((sum, each) => sum + each.x, 0) / near.length : item.x;
      });
      spread(layer, wanted, GAP_X);
    }
  }
  return inColumns(layers, HIGH, GAP_Y);
}

// A long chain goes on at the top again, in the next column, so that all of it can be seen; but not where much crosses.
const SEEN = 9; // as many as are as high as the drawing can be

function inColumns(layers, high, gap) {
  const crossing = layers.slice(1).map((layer) => layer.reduce((sum, item) => sum + item.up.length, 0));
  const crossed = (most) => (each) => crossing.every((number, at) => (at + 1) % each !== 0 || number <= most);
  const alike = Math.ceil(layers.length / Math.ceil(layers.length / SEEN));
  const tried = [alike, SEEN, 8, 7, 6, 5, 10, 11].filter((size) => size < layers.length);
  let sizes = layers.length > SEEN ? tried.filter(crossed(1)) : [];
  if (!sizes.length && layers.length > 12) sizes = tried.filter(crossed(2));
  const each = sizes.length ? sizes[0] : layers.length;
  let left = 16, tallest = 0;
  for (let start = 0; start < layers.length; start += each) {
    const column = layers.slice(start, start + each), items = column.flat();
    const least = Math.min(...items.map((item) => item.x - item.w / 2)), most = Math.max(...items.map((item) => item.x + item.w / 2));
    column.forEach((layer, at) => layer.forEach((item) => {
      item.x += left - least;
      item.y = 24 + at * (high + gap) + high / 2;
      item.left = left;
    }));
    tallest = Math.max(tallest, column.length);
    left += most - least + 64;
  }
  return { width: left - 48, height: 40 + tallest * (high + gap) };
}

// Put a layer's items as near as can be to where they want to be, without overlaps: runs that touch move together.
function spread(layer, wanted, gap) {
  const runs = [];
  layer.forEach((item, index) => {
    let run = { items: [item], offsets: [0], sum: wanted[index], width: item.w };
    while (runs.length) {
      const last = runs[runs.length - 1];
      const lastLeft = last.sum / last.items.length - last.items[0].w / 2;
      const left = run.sum / run.items.length - run.items[0].w / 2;
      if (lastLeft + last.width + gap <= left) break;
      runs.pop();
      const shift = last.width + gap + run.items[0].w / 2 - last.items[0].w / 2;
      run = {
        items: [...last.items, ...run.items],
        offsets: [...last.offsets, ...run.offsets.map((offset) => offset + shift)],
        sum: last.sum + run.sum - shift * run.items.length,
        width: last.width + gap + run.width,
      };
    }
    runs.push(run);
  });
  for (const run of runs) run.items.forEach((item, index) => { item.x = run.sum / run.items.length + run.offsets[index]; });
}
