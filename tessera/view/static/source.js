// The data of the page from the server. A report has a source of its own with the same functions.

async function request(path, options) {
  const response = await fetch(path, options);
  const content = await response.json().catch(() => ({ error: response.statusText }));
  if (!response.ok) throw new Error(content.error ?? `The server answered ${response.status}.`);
  return content;
}

const query = (values) => new URLSearchParams(values).toString();

export const server = {
  isLive: true,
  runs: () => request("/api/runs"),
  run: (run) => request(`/api/run?${query({ run })}`),
  metrics: (run) => request(`/api/metrics?${query({ run })}`),
  samples: async (run) => (await request(`/api/samples?${query({ run })}`)).steps,
  histograms: async (run) => (await request(`/api/histograms?${query({ run })}`)).validations,
  history: async (run) => (await request(`/api/history?${query({ run })}`)).history,
  forms: (run) => request(`/api/forms?${query({ run })}`),
  jobs: async (run) => (await request(`/api/jobs?${query({ run })}`)).jobs,
  fileUrl: (run, folder, name) => `/api/file?${query({ run, folder, name })}`,

  start: (run, command, values) =>
    request(`/api/jobs?${query({ run })}`, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ command, values }),
    }),
  cancel: (job) => request(`/api/jobs/${job}`, { method: "DELETE" }),
  upload: (run, field, file, name) =>
    request(`/api/upload?${query({ run, field, name })}`, { method: "POST", body: file }),

  followTable: (handlers) => follow(() => "/api/runs/events", handlers),
  // The states of runs and, if there are cursors, the records after them.
  followRuns: (runs, cursors, handlers) => {
    const names = runs.map((run) => query({ run })).join("&");
    return follow((last) => `/api/run/events?${names}&${query({ cursors: last || cursors.join(",") })}`, handlers);
  },
  followJobs: (run, handlers) => follow(() => `/api/jobs/events?${query({ run })}`, handlers),
};

// Follow a stream until the returned function is called. A browser opens only six connections to one
// server, so a page has one stream, and none while it is hidden.
function follow(path, handlers) {
  let events = null;
  let last = "";
  function open() {
    events = new EventSource(path(last));
    for (const [name, handler] of Object.entries(handlers)) {
      events.addEventListener(name, (event) => {
        last = event.lastEventId || last;
        handler(JSON.parse(event.data));
      });
    }
  }
  function update() {
    if (document.hidden) {
      events?.close();
      events = null;
    } else if (!events) open();
  }
  document.addEventListener("visibilitychange", update);
  update();
  return () => {
    document.removeEventListener("visibilitychange", update);
    events?.close();
  };
}
