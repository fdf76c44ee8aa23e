// Calls to the server, with the API key where it asks for one. The key stays in this tab's session storage.

const STORED = "pyserve-api-key";
let asking = null; // the question that is open, one for all callers
let isRefused = false; // the user said "not now": only what the user does asks again

export class ServerError extends Error {
  constructor(status, message, body) {
    super(message);
    this.status = status;
    this.body = body;
  }
}

// The answer of the server. Throws ServerError with the server's own words.
export async function call(path, { isAsked = false, ...options } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(STORED);
    const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
    const response = await fetch(path, { ...options, headers });
    if (response.ok) return response;
    const error = await readError(response);
    if (response.status !== 401 || (isRefused && !isAsked)) throw error;
    if (key !== sessionStorage.getItem(STORED)) continue; // answered while this call was under way
    asking ??= askForKey(key !== null).finally(() => (asking = null));
    if (!(await asking)) throw error;
  }
}

export async function getJson(path) {
  return (await call(path, { cache: "no-store" })).json();
}

// The lines of a streamed answer, as they come.
export async function* readLines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    yield* lines;
  }
}

async function readError(response) {
  const body = await response.json().catch(() => ({}));
  return new ServerError(response.status, body.error?.message ?? `The server answered ${response.status}`, body);
}

// Resolves to whether a key was given.
function askForKey(wasWrong) {
  const dialog = document.getElementById("key-dialog");
  const input = document.getElementById("key");
  document.getElementById("key-wrong").textContent = wasWrong ? "The server does not know that key." : "";
  input.value = "";
  return new Promise((resolve) => {
    const finish = (isGiven) => {
      isRefused = !isGiven;
      dialog.close();
      resolve(isGiven);
    };
    dialog.querySelector("form").onsubmit = (event) => {
      event.preventDefault();
      sessionStorage.setItem(STORED, input.value.trim());
      finish(true);
    };
    document.getElementById("key-cancel").onclick = () => finish(false);
    dialog.oncancel = () => finish(false);
    dialog.showModal();
  });
}
