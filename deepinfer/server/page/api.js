// The server, asked from this page: addresses relative to it, the key of this tab, errors in words.

const KEY = "deepinfer.key";

/** Texts that outlive a reload of this tab and nothing else. */
export const tab = {
  get(name) {
    try {
      return sessionStorage.getItem(name);
    } catch {
      return null; // the browser allows no storage
    }
  },
  set(name, value) {
    try {
      if (value) sessionStorage.setItem(name, value);
      else sessionStorage.removeItem(name);
    } catch {
      // full or forbidden: the page works without
    }
  },
};

export const apiKey = { get: () => tab.get(KEY) ?? "", set: (value) => tab.set(KEY, value) };

/** Something that a person should read. status: of the HTTP answer, 0 if there was none. */
export class ServerError extends Error {
  constructor(message, { status = 0, code = null, retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter;
  }
}

export const UNREACHABLE = "The server cannot be reached. Is it still running?";

/** fetch with the key. ServerError if the answer is none of success. */
export async function ask(path, options = {}) {
  const headers = { ...options.headers };
  const key = apiKey.get();
  if (key) headers.authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError" || error.name === "TimeoutError") throw error;
    throw new ServerError(UNREACHABLE);
  }
  if (response.ok) return response;
  throw await refusal(response);
}

async function refusal(response) {
  let body = null;
  try {
    body = await response.json();
  } catch {
    // no JSON: a proxy's page, perhaps
  }
  const retryAfter = parseFloat(response.headers.get("retry-after")) || null;
  const message = body?.error?.message ?? `The server answered with status ${response.status}.`;
  return new ServerError(message, { status: response.status, code: body?.error?.code ?? null, retryAfter });
}

/**
 * The chunks of a streamed chat completion. Leaving the loop, or aborting the signal, cancels the request.
 * ServerError, also for one that comes in the middle of the stream, and for a stream that ends without its end.
 */
export async function* streamChat(body, signal) {
  const response = await ask("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  for await (const data of eventData(response)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(chunk.error.message, { status: response.status, code: chunk.error.code });
    yield chunk;
  }
  throw new ServerError("The answer broke off: the connection was closed before its end.");
}

/** The data of server-sent events, one line each as this server writes them. */
async function* eventData(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      let piece;
      try {
        piece = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new ServerError("The answer broke off: the connection was lost.");
      }
      if (piece.done) return;
      const lines = (rest + piece.value).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
