// Lets real nodes, simulated ones, or both through to the heatmaps. A layout and its frames are cut alike,
// so that cell numbers mean the same in both. Nothing is cut, and nothing copied, where all are shown.
export class Sieve {
  constructor(kind) {
    this.kind = kind;
    this.kept = null;
    this.columns = 0;
  }

  // Remembers which rows it let through: frames of this layout follow.
  layout(layout) {
    if (layout === null || !this.kind) { this.kept = null; return layout; }
    const wanted = this.kind === "simulated";
    this.kept = [...layout.rows.keys()].filter((row) => Boolean(layout.rows[row].simulated) === wanted);
    this.columns = layout.columns;
    return { ...layout, rows: this.kept.map((row) => layout.rows[row]) };
  }

  frame(frame) {
    if (frame === null || this.kept === null) return frame;
    const cut = (cells) => {
      const left = new cells.constructor(this.kept.length * this.columns);
      this.kept.forEach((row, at) => left.set(cells.subarray(row * this.columns, (row + 1) * this.columns), at * this.columns));
      return left;
    };
    return { ...frame, statuses: cut(frame.statuses), codes: frame.codes.map(cut) };
  }
}
