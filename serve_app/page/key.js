// Owns the API key: whether the server needs one, the dialog that asks for it, and where it is until the tab is closed.
// Never puts it into an address, and never sends it elsewhere than to this server.

const key = new Kept("sessionStorage", `chunkserve-key:${base.pathname}`);
let isNeeded = key.value !== null;  // or else it would not have been entered
let asked = null;  // the answer to the dialog that is open

const authorized = (value = key.value) => (value ? { Authorization: `Bearer ${value}` } : {});

/** Fetch the list of models: the cheapest way to learn whether a key is needed, and whether this one is right. */
async function tryKey(value) {
  const response = await fetch(at("v1/models"), { headers: authorized(value) }).catch(() => { throw new Failure(GONE); });
  if (response.status === 401) {
    isNeeded = true;
    return false;
  }
  if (!response.ok) throw await failureOf(response);
  if (!value) isNeeded = false;
  showModels((await response.json()).data);
  return true;
}

/** Ask again which models there are. A key that is no longer right is forgotten. */
async function lookUpModels() {
  try {
    const tried = key.value;
    if (!(await tryKey(tried)) && key.value === tried) key.set(null);  // another may have been entered meanwhile
  } catch (error) {
    if (!(error instanceof Failure)) throw error;  // the live view tells that the server is gone
  }
  showKey();
}

let lookedUp = null;  // the first look, which a message waits for

/** Whether requests can be sent: no key is needed, there is one, or somebody has entered one now. */
async function haveKey() {
  await lookedUp;
  return !isNeeded || key.value !== null || askForKey("This server needs an API key.");
}

/** After a failure: ask for another key if the server has refused this one. */
function ifRefused(error) {
  if (error.status !== 401) return;
  isNeeded = true;
  key.set(null);
  showKey();
  askForKey("The server does not accept this key.");
}

function showKey() {
  $("key-button").hidden = !isNeeded;
  $("key-button").textContent = key.value === null ? "Enter API key" : "API key";
  $("key-forget").hidden = key.value === null;
}

/** Open the dialog. The promise is true once a key was accepted, and false if the dialog is closed without one. */
function askForKey(told) {
  if (asked) return asked.promise;
  asked = {};
  asked.promise = new Promise((resolve) => { asked.resolve = resolve; });
  $("key-told").textContent = told;
  $("key-told").classList.remove("bad");
  $("key").value = "";
  $("key-dialog").showModal();
  return asked.promise;
}

async function checkKey() {
  const value = $("key").value.trim();
  const bad = (text) => { $("key-told").textContent = text; $("key-told").classList.add("bad"); $("key").select(); };
  if (!/^[\x21-\x7e]+$/.test(value)) return bad("A key has letters, digits and signs of ASCII, and no spaces.");
  try {
    if (!(await tryKey(value))) return bad("The server does not accept this key.");
  } catch (error) {
    return bad(error.message);
  }
  key.set(value);
  closeKey(true);
}

function closeKey(has) {
  $("key").value = "";
  $("key-dialog").close();
  showKey();
  asked?.resolve(has);
  asked = null;
}

function forgetKey() {
  key.set(null);
  closeKey(false);
}
