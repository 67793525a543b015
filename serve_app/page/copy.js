// Owns the buttons that copy a text.
// Never reads what somebody else has copied.

const COPIED_MS = 1500;

/** Copy, also where browsers have no clipboard: on a page without TLS that is not of this machine. */
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = document.createElement("textarea");
    field.value = text;
    field.className = "unseen";
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    return done;
  }
}

/** A button that copies what `text` returns. */
function copyButton(label, text) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "quiet copy";
  button.textContent = label;
  button.addEventListener("click", async () => {
    button.textContent = (await copied(text())) ? "Copied" : "Not copied";
    button.focus();
    setTimeout(() => { button.textContent = label; }, COPIED_MS);
  });
  return button;
}
