// Owns the two values that outlive a reload: the colours that were chosen, and this tab's key.
// Never keeps a word of a conversation.

/** A value in `localStorage`, or in `sessionStorage`, which ends with the tab. Where a browser keeps nothing, it lives
 * as long as the page. */
class Kept {
  constructor(area, name) {
    this.name = name;
    this.value = null;
    try {
      this.storage = window[area];
      this.value = this.storage.getItem(name);
    } catch {
      this.storage = null;  // forbidden in this browser
    }
  }

  set(value) {
    this.value = value;
    try {
      if (value === null) this.storage?.removeItem(this.name);
      else this.storage?.setItem(this.name, value);
    } catch {
      this.storage = null;  // full
    }
  }
}
