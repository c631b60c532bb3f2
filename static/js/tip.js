// The one tooltip of a page: whoever showed it last owns it.
export class Tip {
  constructor(element, link) {
    this.element = element;
    this.link = link;
    this.owner = null;
  }

  clockOffset() {
    return this.link.clockOffset;
  }

  show(owner, said, x, y) {
    this.owner = owner;
    const head = document.createElement("b");
    head.textContent = said.title;
    const value = document.createElement("div");
    value.textContent = said.value;
    const lines = said.lines.map((line) => {
      const element = document.createElement("span");
      element.className = "soft";
      element.textContent = line;
      return element;
    });
    this.element.replaceChildren(head, value, ...lines);
    this.element.hidden = false;
    const { offsetWidth, offsetHeight } = this.element;
    const left = Math.min(x + 14, window.innerWidth - offsetWidth - 8);
    const top = y + 18 + offsetHeight > window.innerHeight ? y - offsetHeight - 10 : y + 18;
    this.element.style.transform = `translate(${Math.max(8, left)}px, ${Math.max(8, top)}px)`;
  }

  hide(owner) {
    if (this.owner !== owner) return;
    this.owner = null;
    this.element.hidden = true;
  }
}
