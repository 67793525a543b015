// Owns what happens when: keys, buttons, and the page coming into sight.
// Never does the work itself.

$("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("composer").addEventListener("keydown", (event) => {
  const sends = event.target === $("prompt") && event.key === "Enter" && !event.shiftKey && !event.isComposing;
  if (!sends) return;  // Enter may also end a word that is being composed
  event.preventDefault();
  send();
});
$("stop").addEventListener("click", () => running?.abort());
$("models").addEventListener("change", () => { $("model").textContent = $("models").value; });
$("new-chat").addEventListener("click", newChat);
$("load").addEventListener("click", toggleLoad);
$("timing").addEventListener("submit", (event) => {
  event.preventDefault();
  if ($("timing-id").value.trim()) explain($("timing-id").value.trim());
});
document.addEventListener("visibilitychange", follow);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const card of cards.values()) card.chart.draw(card.steps);
});
for (const link of document.links) link.href = at(link.getAttribute("href"));
follow();
