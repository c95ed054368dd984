// Requests to the server that this page is from; a browser that has been told the token says it by itself.

const url = (path) => new URL(path, location.origin);

async function problem(response) {
  try {
    return new Error((await response.json()).error.message);
  } catch {
    return new Error(`the server answered ${response.status}`);
  }
}

export async function models() {
  const response = await fetch(url("/v1/models"));
  if (!response.ok) throw await problem(response);
  return (await response.json()).data;
}

// Call `onText` with each text of an answer as it comes; return why it ended.
export async function chat(body, signal, onText) {
  const response = await fetch(url("/v1/chat/completions"), {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  });
  if (!response.ok) throw await problem(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", reason = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return reason;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      const choice = chunk.choices[0];
      if (!choice) continue;
      if (choice.delta.content) onText(choice.delta.content);
      reason = choice.finish_reason ?? reason;
    }
  }
  throw new Error("the server closed the connection before the answer ended");
}
