// Owns what happens when: keys, buttons, and the page coming into sight.
// Never does the work itself.

$("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("composer").addEventListener("keydown", (event) => {
  const sends = event.target === $("prompt") && event.key === "Enter" && !event.shiftKey && !event.isComposing;
  if (!sends) return;  // Enter may also end a word that is being composed
  event.preventDefault();
  send();
});
$("log").addEventListener("scroll", noteScroll);
$("stop").addEventListener("click", () => running?.abort());
$("new-chat").addEventListener("click", newChat);
$("load").addEventListener("click", toggleLoad);
$("theme").addEventListener("click", nextTheme);
$("key-button").addEventListener("click", () => askForKey("The key of this server's API."));
$("key-form").addEventListener("submit", (event) => { event.preventDefault(); checkKey(); });
$("key-cancel").addEventListener("click", () => closeKey(false));
$("key-forget").addEventListener("click", forgetKey);
$("key-dialog").addEventListener("cancel", (event) => { event.preventDefault(); closeKey(false); });
$("timing").addEventListener("submit", async (event) => {
  event.preventDefault();
  const id = $("timing-id").value.trim();
  if (id && (await haveKey())) explain(id, $("timing-shown"));
});
document.addEventListener("visibilitychange", () => {
  follow();
  if (!document.hidden) lookUpModels();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
for (const anchor of document.links) anchor.href = at(anchor.getAttribute("href"));
showTheme();
showExamples();
lookedUp = lookUpModels();
follow();
