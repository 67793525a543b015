// Owns the choice of a model: the names that the server lists, of models, adapters and aliases.
// Never assumes that there is one.

let models = [];  // as the server lists them

function option({ id, parent = null, root = id }) {
  const item = document.createElement("option");
  item.value = id;
  const about = parent === null ? root : `adapter of ${parent}`;
  item.textContent = about === id ? id : `${id} (${about})`;
  return item;
}

/** Offer what the server lists, and keep the choice if it is still there. */
function showModels(listed) {
  if (JSON.stringify(listed) === JSON.stringify(models)) return;  // the list may be open
  const chosen = modelName();
  models = listed;
  $("model").replaceChildren(...listed.map(option));
  if (listed.some(({ id }) => id === chosen)) $("model").value = chosen;
}

/** A name to show as long as no list is known: it may need a key. */
function suggestModel(id) {
  if (id && !models.length && modelName() !== id) $("model").replaceChildren(option({ id }));
}

const modelName = () => $("model").value;

/** The most tokens of prompt and answer. */
function modelLength() {
  const found = models.find(({ id }) => id === modelName());
  if (!found) throw new Failure("The server has not listed its models.");
  return found.max_model_len;
}
