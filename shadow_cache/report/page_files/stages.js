// The stages side by side, with what each line came from and became.

class Stages {
  // show(nodes) is told which nodes of the tape the chosen line belongs to
  constructor(graph, show) {
    this.graph = graph;
    this.stages = graph.stages;
    this.show = show;
    this.chosen = null;
    this.marks = this.stages.map(() => new Set());
    this.became = this.stages.map((stage) => stage.lines.map(() => null));
    this.stages.forEach((stage, at) => stage.lines.forEach((line, index) => {
      if (!at || !Array.isArray(line.links)) return;
      for (const from of line.links) {
        const list = this.became[at - 1];
        if (from < list.length) (list[from] = list[from] || []).push(index);
      }
    }));
    const columns = this.stages.map((stage, at) => this.column(stage, at));
    byId('stages').style.setProperty('--rows', `${Math.max(160, 22 + 20 * Math.max(...this.stages.map((stage) => stage.rows.length)))}px`);
    byId('stages').replaceChildren(...columns);
  }

  column(stage, at) {
    stage.rows = this.rowsOf(stage, at);
    stage.rowOf = new Map(stage.rows.map((row, index) => [row.line, index]).filter(([line]) => line !== undefined));
    const told = stage.found = el('span', { 'aria-live': 'polite' }, stage.lines.length ? plural(stage.lines.length, 'line') : '');
    const head = el('div', { class: 'stage-head' }, el('b', {}, stage.title), told);
    if (!stage.lines.length) {
      return el('div', { class: 'stage' }, head, el('div', { class: 'empty' }, el('span', {}, stage.note || 'This stage is empty.')));
    }
    const width = stage.lines.reduce((most, line) => Math.max(most, line.text.length), 0);
    stage.list = new List({ count: stage.rows.length, label: `${stage.title}, lines`, width: Math.min(width, 600) + 4,
      render: (index, row) => this.draw(at, index, row), choose: (index) => this.choose(at, index), point: (index) => this.point(at, index) });
    stage.list.host.addEventListener('keydown', (event) => this.beside(event, at));
    return el('div', { class: 'stage' }, head, stage.list.host, stage.note ? el('p', {}, stage.note) : null);
  }

  rowsOf(stage, at) {
    const { steps } = this.graph, rows = [];
    const step = new Array(stage.lines.length).fill(null);
    const begins = new Map();
    for (const block of stage.blocks) {
      step.fill(block.step, block.first, block.first + block.size);
      begins.set(block.first, block);
    }
    stage.lines.forEach((line, index) => {
      const block = begins.get(index);
      if (at && block && steps[block.step]) rows.push({ title: steps[block.step], step: block.step });
      rows.push({ line: index, step: step[index] });
    });
    return rows;
  }

  draw(at, index, row) {
    const { title, line, step } = this.stages[at].rows[index];
    const kind = step === null || !this.graph.steps[step] ? '' : ` k-${this.graph.steps[step].kind}${step % 2 ? ' odd' : ''}`;
    row.className += kind;
    if (title) {
      row.classList.add('title');
      row.textContent = shown(`${title.title}${title.kind === 'region' ? `, ${plural(title.calls, 'call')}` : ''}${title.seconds ? `, ${seconds(title.seconds)}` : ''}`);
      return;
    }
    const text = shown(this.stages[at].lines[line].text);
    const cut = at === 1 ? text.lastIndexOf('  # ') : -1;
    if (cut > 0) row.append(text.slice(0, cut), el('span', { class: 'shape' }, text.slice(cut)));
    else row.textContent = text;
    if (at === 0 && text.startsWith('#')) row.classList.add('head');
    row.classList.toggle('linked', this.marks[at].has(this.own(at, line)));
  }

  // The line whose links another one shares.
  own(at, line) {
    const { links } = this.stages[at].lines[line];
    return typeof links === 'number' ? links : line;
  }

  // For each stage, the lines that one line came from and became.
  linksOf(at, line) {
    const found = this.stages.map(() => new Set());
    found[at].add(this.own(at, line));
    for (let stage = at; stage > 0; stage--) {
      for (const each of found[stage]) {
        const { links } = this.stages[stage].lines[each];
        if (Array.isArray(links)) links.forEach((from) => from < this.stages[stage - 1].lines.length && found[stage - 1].add(this.own(stage - 1, from)));
      }
    }
    for (let stage = at; stage + 1 < this.stages.length; stage++) {
      for (const each of found[stage]) (this.became[stage][each] || []).forEach((to) => found[stage + 1].add(to));
    }
    return found;
  }

  point(at, index) {
    const row = index >= 0 ? this.stages[at].rows[index] : null;
    if (row && row.line !== undefined) this.mark(this.linksOf(at, row.line), false);
    else if (row) this.mark(this.stages.map(() => new Set()), false);
    else if (this.chosen) this.mark(this.chosen, false);
    else this.mark(this.stages.map(() => new Set()), false);
  }

  choose(at, index) {
    const row = this.stages[at].rows[index];
    if (row.line === undefined) { this.step(row.step, at); return; }
    this.chosen = this.linksOf(at, row.line);
    this.mark(this.chosen, true, at);
    const nodes = new Set();
    for (const line of this.chosen[0]) if (typeof this.stages[0].lines[line].node === 'number') nodes.add(this.stages[0].lines[line].node);
    this.show(nodes);
  }

  // Mark lines; `into` brings them into view in all stages but one.
  mark(found, into, but = -1) {
    this.stages.forEach((stage, at) => {
      if (!stage.list) return;
      const before = this.marks[at];
      this.marks[at] = found[at];
      for (const [index, row] of stage.list.rows) {
        const { line } = stage.rows[index];
        if (line !== undefined) row.classList.toggle('linked', found[at].has(this.own(at, line)));
      }
      if (before.size !== found[at].size) stage.found.textContent = found[at].size ? `${count(found[at].size)} linked` : plural(stage.lines.length, 'line');
      if (into && at !== but && found[at].size) {
        const first = stage.rowOf.get(Math.min(...found[at]));
        if (first !== undefined) stage.list.show(first);
      }
    });
  }

  // Bring a step's block into view in every stage.
  step(step, but = -1) {
    this.stages.forEach((stage, at) => {
      const block = stage.blocks.find((each) => each.step === step);
      if (!block || !stage.list || at === but) return;
      const row = stage.rowOf.get(block.first);
      stage.list.host.scrollTop = Math.max(0, (row - (at ? 1 : 0)) * stage.list.rowHeight);
      stage.list.draw();
    });
  }

  // Choose the line that a node of the tape begins at.
  node(index) {
    const line = this.stages[0].lines.findIndex((each) => each.node === index);
    if (line < 0 || !this.stages[0].list) return;
    this.line(0, line);
  }

  line(at, line, focus = false) {
    const { list, rowOf } = this.stages[at];
    const row = rowOf.get(line);
    if (!list || row === undefined) return;
    list.show(row, true);
    list.move(row, true);
    if (focus) list.host.focus({ preventScroll: true });
  }

  beside(event, at) {
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === 'Escape') { this.chosen = null; this.mark(this.stages.map(() => new Set()), false); this.show(new Set()); return; }
    if (!way || event.altKey || event.ctrlKey || event.metaKey) return;
    for (let other = at + way; other >= 0 && other < this.stages.length; other += way) {
      const { list, rowOf } = this.stages[other];
      if (!list) continue;
      const linked = this.chosen && this.chosen[other].size ? rowOf.get(Math.min(...this.chosen[other])) : undefined;
      list.host.focus({ preventScroll: true });
      if (linked !== undefined) list.move(linked);
      event.preventDefault();
      return;
    }
  }
}
