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

  followRuns: (handlers) => follow("/api/runs/events", handlers),
  followRun: (run, cursor, handlers) => follow(`/api/run/events?${query({ run, cursor })}`, handlers),
  followJob: (job, handlers) => follow(`/api/jobs/${job}/events`, handlers),
};

function follow(path, handlers) {
  const events = new EventSource(path);
  for (const [name, handler] of Object.entries(handlers)) {
    events.addEventListener(name, (event) => handler(JSON.parse(event.data), events));
  }
  return () => events.close();
}
