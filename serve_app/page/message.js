// Owns one message as it is shown: its text, thoughts and notes, and below an answer its pace and its time by cause.
// Never asks the server for anything that nobody wants to see.

let following = true, scrolling = 0;

/** Whether to follow what comes: not while somebody has scrolled up to read. */
function noteScroll() {
  const log = $("log");
  following = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
}

/** Once a frame at most, since it makes the browser lay out what was added. */
function scrollLog(always = false) {
  following ||= always;
  scrolling ||= requestAnimationFrame(() => {
    scrolling = 0;
    if (following) $("log").scrollTop = $("log").scrollHeight;
  });
}

class Message {
  constructor(role, name) {
    this.item = $("message").content.firstElementChild.cloneNode(true);
    this.item.classList.add(role);
    this.part("name").textContent = name;
    $("log").append(this.item);
  }

  part(name) { return this.item.querySelector(`.${name}`); }

  note(told, isBad = false) {
    this.part("note").hidden = false;
    this.part("note").textContent = told;
    this.part("note").classList.toggle("bad", isBad);
    scrollLog(true);
  }
}

/** What somebody has written, as it was written. */
class Question extends Message {
  constructor(text) {
    super("user", "You");
    this.part("text").textContent = text;
    this.part("after").remove();
    scrollLog(true);
  }
}

/** What a model writes: Markdown, or JSON, with the thoughts before it as plain text. */
class Answer extends Message {
  constructor(model, isJson) {
    super("assistant", model || "Model");
    this.markdown = new Markdown(this.part("text"), () => scrollLog(), isJson ? "```json\n" : "");
    this.item.setAttribute("aria-busy", true);  // so that it is read out once, when it is whole
    scrollLog(true);
  }

  get text() { return this.markdown.source; }

  write(text) { this.markdown.append(text); }

  think(text) {
    const thought = this.part("thought");
    thought.hidden = false;
    if (!thought.firstChild) thought.append(new Text());
    thought.firstChild.appendData(text);
    scrollLog();
  }

  end(pace) {
    this.markdown.finish();
    this.item.setAttribute("aria-busy", false);
    this.part("pace").textContent = String(pace);
    this.part("after").hidden = !pace.id && !this.text;
    if (this.text) this.part("pace").after(copyButton("Copy answer", () => this.text));
    const why = this.part("why");
    why.hidden = !pace.id;
    why.addEventListener("toggle", () => { if (why.open) explain(pace.id, why); });
    scrollLog();
  }
}
