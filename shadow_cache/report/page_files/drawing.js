// The drawing of a tape, folded by module: one view at a time, from the whole down to single nodes.

class Drawing {
  // choose(node or null) is told of every node that is chosen here
  constructor(graph, choose) {
    this.graph = graph;
    this.choose = choose;
    this.path = [treeOf(graph.nodes)];
    this.linked = new Set();
    this.view();
  }

  get group() { return this.path[this.path.length - 1]; }

  view(focus = false) {
    const { nodes } = this.graph;
    this.boxes = boxesOf(this.group);
    const edges = joined(this.boxes, nodes);
    this.boxes.forEach((box) => { [box.text, box.second] = this.words(box); });
    const size = placed(this.boxes, edges, (box) => Math.min(230, Math.max(56, 7 * Math.max(box.text.length, box.second.length * 0.92) + 22)));
    this.picture = svg('svg', { width: size.width, height: size.height, role: 'group',
      'aria-label': `Drawing of ${this.group.path || 'the whole tape'}: ${plural(this.boxes.length, 'box')}`.replace('boxs', 'boxes') });
    this.edges = edges;
    for (const edge of edges) {
      edge.line = svg('path', { class: edge.back ? 'edge back' : 'edge', d: this.curve(edge) });
      this.picture.append(edge.line);
    }
    this.boxes.forEach((box, index) => this.picture.append(this.box(box, index)));
    const host = byId('canvas');
    host.replaceChildren(this.picture);
    host.scrollTop = 0;
    host.scrollLeft = Math.max(0, (size.width - host.clientWidth) / 2);
    this.crumbs();
    this.active = -1;
    this.reach(0);
    this.tell(null);
    this.mark();
    if (focus && this.boxes.length) this.focus(0);
  }

  words(box) {
    const { nodes } = this.graph;
    if (box.outside) return [box.outside, ''];
    if (box.group) {
      const base = this.group.path ? `${this.group.path}.` : '';
      const whole = box.group.run ? box.group.name : box.group.path;
      const path = whole.startsWith(base) ? whole.slice(base.length) : whole;
      return [clipMiddle(shown(path || box.group.name || 'all'), 30), plural(box.size, 'node')];
    }
    const node = nodes[box.node];
    const name = node.name.replace(/Backward(\d*)$/, (_, digit) => (digit && digit !== '0' ? ` ${digit}` : ''));
    if (node.parameter !== null) return [clipMiddle(shown(node.parameter), 30), 'AccumulateGrad'];
    const base = this.group.path;
    const inside = base && node.module.startsWith(base) ? node.module.slice(base.length).replace(/^\./, '') : node.module;
    return [clipMiddle(shown(name), 30), clipMiddle(shown(inside), 30)];
  }

  box(box, index) {
    const node = box.node === undefined ? null : this.graph.nodes[box.node];
    const step = node && node.step !== null ? this.graph.steps[node.step] : null;
    const name = box.outside ? 'outside' : box.group ? 'group' : node.parameter !== null ? 'leaf' : step && step.kind === 'users' ? 'users' : 'node';
    const left = box.x - box.w / 2, top = box.y - box.h / 2;
    const label = box.group ? `${box.text}, ${box.second}, opens` : [box.text, box.second].filter(Boolean).join(', ');
    const group = svg('g', { class: `box ${name}`, tabindex: -1, role: 'button', 'aria-label': label,
      onclick: () => this.focus(index), ondblclick: () => this.open(index), onkeydown: (event) => this.keydown(event, index),
      onfocus: () => this.reach(index) });
    if (box.group) group.append(svg('rect', { class: 'under', x: left + 3, y: top + 3, width: box.w, height: box.h }));
    group.append(svg('rect', { x: left, y: top, width: box.w, height: box.h }),
      svg('text', { x: box.x, y: box.second ? box.y - 3 : box.y + 4 }, box.text));
    if (box.second) group.append(svg('text', { class: 'second', x: box.x, y: box.y + 12 }, box.second));
    if (node) group.append(svg('title', {}, shown([`#${node.index} ${node.name}`, node.parameter, node.module, node.source].filter(Boolean).join('\n'))));
    box.shape = group;
    return group;
  }

  curve(edge) {
    if (edge.back) {
      const from = this.boxes[edge.from], to = this.boxes[edge.to];
      const side = Math.max(from.x + from.w / 2, to.x + to.w / 2) + 18;
      return `M${from.x + from.w / 2},${from.y} C${side},${from.y} ${side},${to.y} ${to.x + to.w / 2},${to.y}`;
    }
    let path = '';
    for (let at = 1; at < edge.way.length; at++) {
      const from = edge.way[at - 1], to = edge.way[at];
      const y0 = from.y + from.h / 2, y1 = to.y - to.h / 2, half = (y0 + y1) / 2;
      path += at === 1 ? `M${from.x},${y0}` : `L${from.x},${y0}`;
      if (to.left === from.left) path += ` C${from.x},${half} ${to.x},${half} ${to.x},${y1} `;
      else { // up, between the columns
        const between = to.left - 32;
        path += ` Q${from.x},${y0 + 14} ${from.x + 14},${y0 + 14} H${between - 12} Q${between},${y0 + 14} ${between},${y0 + 2} V${y1 - 2} Q${between},${y1 - 14} ${between + 12},${y1 - 14} H${Math.max(to.x - 10, between + 12)} Q${to.x},${y1 - 14} ${to.x},${y1} `;
      }
    }
    return path;
  }

  crumbs() {
    const links = this.path.flatMap((group, at) => [
      at ? el('span', { 'aria-hidden': 'true' }, '/') : null,
      at === this.path.length - 1 ? el('b', { 'aria-current': 'location' }, this.nameOf(group))
        : el('button', { type: 'button', class: 'link', onclick: () => this.up(at) }, this.nameOf(group)),
    ]).filter(Boolean);
    byId('path').replaceChildren(...links, el('span', {}, `· ${plural(this.group.size, 'node')}`));
  }

  nameOf(group) { return shown(group.run ? group.name : group.path || 'whole tape'); }

  // The one box that Tab comes to.
  reach(index) {
    this.boxes.forEach((box, at) => box.shape.setAttribute('tabindex', at === index ? 0 : -1));
    if (this.active >= 0 && this.boxes[this.active]) this.boxes[this.active].shape.classList.remove('chosen');
    this.active = index;
    if (document.activeElement === this.boxes[index]?.shape) this.pick(index);
  }

  focus(index) {
    this.boxes[index].shape.focus({ preventScroll: true });
    this.reach(index);
    this.pick(index);
  }

  pick(index) {
    const box = this.boxes[index], host = byId('canvas');
    box.shape.classList.add('chosen');
    this.edges.forEach((edge) => edge.line.classList.toggle('on', edge.from === index || edge.to === index));
    if (box.y - box.h < host.scrollTop || box.y + box.h > host.scrollTop + host.clientHeight) host.scrollTop = box.y - host.clientHeight / 2;
    if (box.x - box.w / 2 < host.scrollLeft || box.x + box.w / 2 > host.scrollLeft + host.clientWidth) host.scrollLeft = box.x - host.clientWidth / 2;
    this.tell(box);
    if (box.node !== undefined) this.choose(box.node);
  }

  open(index) {
    const box = this.boxes[index];
    if (!box.group) return;
    this.path.push(box.group);
    this.view(true);
  }

  up(at = this.path.length - 2) {
    if (at < 0) return;
    this.path.length = at + 1;
    this.view(true);
  }

  keydown(event, index) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const box = this.boxes[index];
    const way = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] }[event.key];
    if (event.key === 'Enter' || event.key === ' ') this.open(index);
    else if (event.key === 'Backspace' || event.key === 'Escape') this.up();
    else if (way) {
      let best = -1, least = Infinity;
      if (way[1]) { // along an edge where there is one: it may lead to another column
        for (const edge of this.edges) {
          const [here, there] = way[1] > 0 ? [edge.from, edge.to] : [edge.to, edge.from];
          const far = Math.abs(this.boxes[there].x - box.x) + Math.abs(this.boxes[there].y - box.y);
          if (here === index && !edge.back && far < least) { best = there; least = far; }
        }
      }
      if (best < 0) this.boxes.forEach((other, at) => {
        const along = way[0] ? (other.x - box.x) * way[0] : (other.y - box.y) * way[1];
        const across = way[0] ? Math.abs(other.y - box.y) * 3 : Math.abs(other.x - box.x);
        if (along > 1 && along + across < least && (!way[0] || Math.abs(other.y - box.y) < 2)) { best = at; least = along + across; }
      });
      if (best >= 0) this.focus(best);
    } else return;
    event.preventDefault();
  }

  // Nodes that the chosen line of a stage belongs to.
  show(nodes) {
    this.linked = nodes;
    this.mark();
  }

  mark() {
    this.boxes.forEach((box) => {
      const members = box.group ? membersOf(box.group) : box.node === undefined ? [] : [box.node];
      box.shape.classList.toggle('linked', this.linked.size > 0 && members.some((node) => this.linked.has(node)));
    });
  }

  // Open the module that a node is in, and choose the node.
  go(index) {
    const root = this.path[0];
    this.path = [root];
    for (let depth = 0; depth < 64; depth++) {
      const boxes = boxesOf(this.group);
      const box = boxes.find((each) => (each.group ? membersOf(each.group).includes(index) : each.node === index));
      if (!box || !box.group) break;
      this.path.push(box.group);
    }
    this.view();
    const at = this.boxes.findIndex((box) => box.node === index);
    if (at >= 0) { this.reach(at); this.pick(at); }
  }

  tell(box) {
    const { graph } = this;
    if (!box || box.outside) {
      byId('details').replaceChildren(el('p', { class: 'note' }, box ? 'Nodes outside the open module.' : 'Choose a box.'));
      return;
    }
    if (box.group) {
      const members = membersOf(box.group), kinds = new Map();
      members.forEach((index) => kinds.set(graph.nodes[index].name, (kinds.get(graph.nodes[index].name) || 0) + 1));
      const most = [...kinds].sort((one, other) => other[1] - one[1]);
      byId('details').replaceChildren(el('h4', {}, shown(box.group.run ? box.group.name : box.group.path)),
        definitions([['nodes', count(members.length)], ['parameters', count(members.filter((index) => graph.nodes[index].parameter !== null).length)],
          ...most.slice(0, 8).map(([name, number]) => [name, count(number)])]),
        el('button', { type: 'button', onclick: () => this.open(this.boxes.indexOf(box)) }, 'Open'));
      return;
    }
    const node = graph.nodes[box.node], step = node.step === null ? null : graph.steps[node.step];
    const facts = [['node', `#${node.index}`]];
    if (node.parameter !== null) facts.push(['parameter', node.parameter]);
    if (node.module) facts.push(['module', node.module]);
    if (node.source) facts.push(['forward', node.source]);
    if (step) facts.push(['runs in', step.kind === 'region' && step.seconds !== null ? `${step.title}, ${seconds(step.seconds)}` : step.title]);
    facts.push(['leads to', node.edges.map((edge) => `#${edge} ${graph.nodes[edge].name}`).join(', ') || 'nothing']);
    byId('details').replaceChildren(el('h4', {}, shown(node.name)), definitions(facts));
  }
}
