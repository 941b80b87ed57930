// Questions to the console's server. An Error's message is a sentence for people.

export const session = { csrf: "", may_act: null, log_in: false, trace_url: "" };

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

async function ask(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new ApiError("The console doesn't answer.", 0);
  }
  const answer = await response.json().catch(() => ({ error: response.statusText }));
  if (!response.ok) throw new ApiError(answer.error, response.status);
  return answer;
}

export const get = (path) => ask(path, {});

export const post = (path, body = {}) => ask(path, {
  method: "POST",
  headers: { "Content-Type": "application/json", "X-Relaxd-Csrf": session.csrf },
  body: JSON.stringify(body),
});

export const ofRun = (run, what, query = {}) => get(`/api/runs/${encodeURIComponent(run)}/${what}?${new URLSearchParams(query)}`);

// The address of a trace in the viewer that the console was told of; "" if there is none.
export const traceUrl = (id) => (id ? session.trace_url.replaceAll("{trace_id}", id) : "");

export async function loadSession() {
  Object.assign(session, await get("/api/session"));
  return session;
}
