import { AgentboxError } from "./errors.js";

/** Maximum number of characters in one event. */
const MAX_EVENT = 256 * 1024 * 1024;

export interface RawEvent {
  event: string;
  data: string;
}

/** Read server-sent events in the format of this API. Leaving the loop closes the connection and ends the call. */
export async function* readEvents(body: ReadableStream<Uint8Array>): AsyncGenerator<RawEvent, void, undefined> {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      let place = Math.max(0, text.length - 1);
      text += decoder.decode(value, { stream: !done });
      let start = 0;
      for (let end; (end = text.indexOf("\n\n", place)) >= 0; place = start) {
        const event = parse(text.slice(start, end));
        start = end + 2;
        if (event !== null) yield event;
      }
      text = text.slice(start);
      if (done) return;
      if (text.length > MAX_EVENT) throw new AgentboxError("the server sent an event that is too large", "link_closed");
    }
  } finally {
    reader.cancel().catch(() => undefined); // it is already closed
  }
}

function parse(block: string): RawEvent | null {
  let event = "";
  const data: string[] = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event: ")) event = line.slice(7);
    else if (line.startsWith("data: ")) data.push(line.slice(6));
  }
  return event ? { event, data: data.join("\n") } : null;
}
