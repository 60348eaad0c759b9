// A list of any length: only the rows that can be seen are there. One stop for Tab; arrows move inside.

let listNumber = 0;

class List {
  // options: count, rowHeight, label, render(index, row), choose(index, fromUser), point(index or -1), width (in ch)
  constructor(options) {
    Object.assign(this, { rowHeight: 20, choose() {}, point() {} }, options);
    this.active = -1;
    this.rows = new Map();
    this.name = `list-${listNumber++}`;
    this.inner = el('div', { class: 'inner' });
    this.host = el('div', { class: 'list', role: 'listbox', tabindex: 0, 'aria-label': this.label }, this.inner);
    this.inner.style.height = `${this.count * this.rowHeight}px`;
    if (this.width) this.inner.style.width = `${this.width}ch`;
    this.host.addEventListener('scroll', () => this.draw());
    this.host.addEventListener('keydown', (event) => this.keydown(event));
    this.host.addEventListener('focus', () => { if (this.active < 0 && this.count) this.move(this.first()); });
    this.inner.addEventListener('click', (event) => {
      const index = this.indexOf(event.target);
      if (index >= 0) this.move(index, true);
    });
    this.inner.addEventListener('mouseover', (event) => this.pointAt(this.indexOf(event.target)));
    this.host.addEventListener('mouseleave', () => this.pointAt(-1));
    new ResizeObserver(() => this.draw()).observe(this.host);
  }

  first() { return Math.min(this.count - 1, Math.floor(this.host.scrollTop / this.rowHeight)); }

  indexOf(target) {
    const row = target.closest('.row');
    return row ? Number(row.dataset.index) : -1;
  }

  pointAt(index) {
    if (index === this.pointed) return;
    this.pointed = index;
    this.point(index);
  }

  draw() {
    const from = Math.max(0, Math.floor(this.host.scrollTop / this.rowHeight) - 8);
    const until = Math.min(this.count, Math.ceil((this.host.scrollTop + this.host.clientHeight) / this.rowHeight) + 8);
    for (const [index, row] of this.rows) {
      if (index < from || index >= until) { row.remove(); this.rows.delete(index); }
    }
    for (let index = from; index < until; index++) {
      if (this.rows.has(index)) continue;
      const row = el('div', { class: 'row', role: 'option', id: `${this.name}-${index}`, 'data-index': index,
        'aria-setsize': this.count, 'aria-posinset': index + 1, 'aria-selected': index === this.active });
      row.style.transform = `translateY(${index * this.rowHeight}px)`;
      this.render(index, row);
      row.classList.toggle('active', index === this.active);
      this.rows.set(index, row);
      this.inner.append(row);
    }
  }

  refresh() {
    for (const row of this.rows.values()) row.remove();
    this.rows.clear();
    this.draw();
  }

  show(index, middle = false) {
    const top = index * this.rowHeight, bottom = top + this.rowHeight, height = this.host.clientHeight;
    if (middle || top < this.host.scrollTop || bottom > this.host.scrollTop + height) {
      if (middle || top < this.host.scrollTop - height || bottom > this.host.scrollTop + 2 * height) {
        this.host.scrollTop = Math.max(0, top - height / 3);
      } else this.host.scrollTop = top < this.host.scrollTop ? top : bottom - height;
    }
    this.draw();
  }

  // Make a row the active one; `fromUser` has it chosen too.
  move(index, fromUser = false) {
    const before = this.rows.get(this.active);
    if (before) { before.classList.remove('active'); before.setAttribute('aria-selected', 'false'); }
    this.active = index;
    if (index < 0) { this.host.removeAttribute('aria-activedescendant'); return; }
    this.show(index);
    const row = this.rows.get(index);
    if (row) { row.classList.add('active'); row.setAttribute('aria-selected', 'true'); }
    this.host.setAttribute('aria-activedescendant', `${this.name}-${index}`);
    if (fromUser) this.choose(index);
  }

  keydown(event) {
    if (event.altKey || event.ctrlKey || event.metaKey || !this.count) return;
    const page = Math.max(1, Math.floor(this.host.clientHeight / this.rowHeight) - 1);
    const last = this.count - 1;
    const to = { ArrowDown: this.active + 1, ArrowUp: this.active - 1, PageDown: this.active + page,
      PageUp: this.active - page, Home: 0, End: last }[event.key];
    if (to !== undefined) this.move(Math.max(0, Math.min(last, to)), true);
    else if ((event.key === 'Enter' || event.key === ' ') && this.active >= 0) this.move(this.active, true);
    else return;
    event.preventDefault();
  }
}
