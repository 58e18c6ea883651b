// A list that keeps a row's element while the row's data change, so that focus and selection are kept.

export class KeyedList {
  // `create()` returns a new row, an object with the list item `item`. `update(row, data)` fills a row; `row.data` is
  // the data then. `lost()` is called when the focus was in a row that is removed.
  constructor(list, create, update, lost = null) {
    this.list = list;
    this.create = create;
    this.update = update;
    this.lost = lost;
    this.rows = new Map();
  }

  // Show the data of `items` in their order, each with a `key`.
  render(items) {
    const wanted = new Set(items.map((item) => item.key));
    let isLost = false;
    for (const [key, row] of this.rows) {
      if (wanted.has(key)) continue;
      isLost ||= row.item.contains(document.activeElement);
      row.item.remove();
      this.rows.delete(key);
    }
    let before = null;
    for (const item of items) {
      let row = this.rows.get(item.key);
      if (!row) {
        row = this.create();
        this.rows.set(item.key, row);
      }
      const next = before ? before.nextSibling : this.list.firstChild;
      if (next !== row.item) this.list.insertBefore(row.item, next);
      before = row.item;
      row.data = item;
      this.update(row, item);
    }
    if (isLost) this.lost?.();
  }
}
