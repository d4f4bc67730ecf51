// Against a live server, which tests/test_typescript.py starts and names in the environment.

import assert from "node:assert/strict";
import { createServer } from "node:http";
import type { AddressInfo } from "node:net";
import { after, before, test } from "node:test";

import { AgentboxClient, AgentboxError, type Reason, type Sandbox } from "../src/index.js";
import { readEvents } from "../src/events.js";

const url = process.env.AGENTBOX_TEST_URL!;
const token = process.env.AGENTBOX_TEST_TOKEN!;
const client = new AgentboxClient({ url, token });
let box: Sandbox;

function failsWith(reason: Reason, status: number | number[], field: string | null = null) {
  return (error: unknown) => {
    assert(error instanceof AgentboxError, String(error));
    assert.deepEqual([error.reason, error.field], [reason, field], error.message);
    assert([status].flat().includes(error.status), `${error.status}: ${error.message}`);
    return true;
  };
}

before(async () => {
  box = await client.create({ id: "ts", files: { "a.txt": "one\n" }, env: { WORD: "from env" } });
});

after(async () => {
  await box.delete();
  await assert.rejects(box.info(), failsWith("not_found", 404));
});

test("sandboxes are described, listed and changed", async () => {
  assert.equal((await client.health()).isolation, "gvisor");
  assert.equal((await client.create({ id: "ts", files: { "a.txt": "one\n" }, env: { WORD: "from env" } })).id, "ts");
  assert.deepEqual((await client.list({ state: "running" })).map((info) => info.id), ["ts"]);
  assert.equal((await box.update({ labels: { made: "by test" } })).labels.made, "by test");
  assert.deepEqual(await client.list({ label: ["made=by nobody"] }), []);
});

test("a command gives its output and its status", async () => {
  const done = await box.exec("cat a.txt; echo $WORD; dmesg | head -1; echo wrong >&2; exit 3");
  assert.match(done.stdout, /^one\nfrom env\n.*gVisor/);
  assert.deepEqual([done.stderr, done.exit_code], ["wrong\n", 3]);
  assert.equal((await box.exec(["cat"], { stdin: "$HOME é\n" })).stdout, "$HOME é\n");
});

test("output is read as it is printed, and who stops reading ends the command", async () => {
  const seen: string[] = [];
  for await (const event of box.execStream("echo é; read -t 0.3; echo b >&2; exit 4")) {
    seen.push(event.event === "exit" ? `exit ${event.data.exit_code}` : `${event.event} ${event.data.text}`);
  }
  assert.deepEqual(seen, ["stdout é\n", "stderr b\n", "exit 4"]);
  for await (const event of box.execStream("echo begun; exec sleep 1000")) {
    if (event.event === "stdout") break;
  }
  for (let count = 0; ; count++) {
    const running = (await box.exec("cat /proc/[0-9]*/comm")).stdout;
    if (!running.includes("sleep") || count > 100) return assert(!running.includes("sleep"));
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
});

test("a sandbox is saved, taken back and forked", async () => {
  await box.exec("echo then > /tmp/state");
  const saved = await box.snapshot({ name: "before" });
  assert.deepEqual([saved.name, saved.sandbox], ["before", "ts"]);
  await box.exec("echo now > /tmp/state");
  const other = await box.fork({ snapshot: saved.id });
  try {
    assert.equal((await other.exec("cat /tmp/state")).stdout, "then\n");
    assert.equal((await box.exec("cat /tmp/state")).stdout, "now\n");
  } finally {
    await other.delete();
  }
  assert.equal((await box.restore(saved.id)).id, "ts");
  assert.equal((await box.exec("cat /tmp/state")).stdout, "then\n");
  assert.deepEqual((await box.snapshots()).map((info) => info.id), [saved.id]);
  await client.deleteSnapshot(saved.id);
  assert.deepEqual(await client.snapshots(), []);
});

test("a signal ends a call", async () => {
  const begun = Date.now();
  await assert.rejects(box.exec("sleep 60", { signal: AbortSignal.timeout(500) }), { name: "TimeoutError" });
  assert(Date.now() - begun < 30_000);
});

test("code keeps its variables, and its outputs come as they are made", async () => {
  await box.runCode("x = 20");
  const kinds: unknown[] = [];
  for await (const event of box.runCodeStream("print('hello')\nx + 1")) {
    if (event.event === "stream") kinds.push(event.data.text);
    if (event.event === "result") kinds.push(event.data.display.data["text/plain"]);
    if (event.event === "done") kinds.push(event.data.result.status);
  }
  assert.deepEqual(kinds, ["hello\n", "21", "ok"]);
  assert.equal((await box.runCode("1/0")).error?.ename, "ZeroDivisionError");
});

test("files go in and out whole", async () => {
  const bytes = new Uint8Array(3_000_000).map((_, place) => (place * 7919) >> 3);
  assert.equal((await box.files.upload("sub/data.bin", bytes)).size, bytes.length);
  const back = new Uint8Array(await (await box.files.download("sub/data.bin")).arrayBuffer());
  assert(Buffer.compare(bytes, back) === 0);
  const stream = new Blob(["streamed ", "in"]).stream() as ReadableStream<Uint8Array>;
  await box.files.upload("streamed.txt", stream);
  assert.equal((await box.files.read("streamed.txt")).data, "streamed in");
  await box.files.write("b & c?.txt", "written");
  const names = (await box.files.list()).entries.map((entry) => entry.path);
  assert.deepEqual(names.sort(), ["a.txt", "b & c?.txt", "streamed.txt", "sub"]);
  await box.files.delete("sub", { recursive: true });
  await assert.rejects(box.files.download("sub/data.bin"), failsWith("not_found", 404, "path"));
});

test("what fails says why, by a word and by the field at fault", async () => {
  await assert.rejects(client.sandbox("nobodys").exec("true"), failsWith("not_found", 404));
  const wrong = { memory: "1 GiB" } as object;
  await assert.rejects(client.create(wrong), failsWith("invalid_request", 400, "memory"));
  await assert.rejects(client.create({ allowed_hosts: ["else.example"] }), failsWith("policy_refused", 403, "allowed_hosts"));
  const read = async () => {
    for await (const event of box.execStream("true", { workdir: "nowhere" })) assert.equal(event.event, "stderr");
  };
  // A stream that fails before it has begun answers with a status, and with an event later on.
  await assert.rejects(read, failsWith("invalid_request", [0, 400], "workdir"));
  await assert.rejects(new AgentboxClient({ url, token: "wrong" }).list(), failsWith("unauthenticated", 401));
  await assert.rejects(new AgentboxClient({ url: "http://127.0.0.1:9/", token }).list(), failsWith("unreachable", 0));
  for (const id of ["..", ".", ""]) {
    await assert.rejects(client.sandbox(id).info(), failsWith("invalid_request", 0, "id"));
  }
});

test("the token goes to no other server", async () => {
  const asked: unknown[] = [];
  const other = createServer((request, response) => {
    asked.push(request.url);
    response.writeHead(302, { location: `http://127.0.0.1:${port}/elsewhere` }).end();
  });
  await new Promise<void>((resolve) => other.listen(0, "127.0.0.1", resolve));
  const port = (other.address() as AddressInfo).port;
  const lost = new AgentboxClient({ url: `http://127.0.0.1:${port}/base`, token });
  await assert.rejects(lost.list(), failsWith("unreachable", 0));
  other.close();
  assert.deepEqual(asked, ["/base/api/agentbox/sandboxes"]);
});

test("events are read whatever pieces they come in", async () => {
  const text = 'event: stdout\ndata: {"text": "é"}\n\n: keep-alive\n\nevent: exit\ndata: 1\n\nevent: cut';
  const bytes = new TextEncoder().encode(text);
  for (const size of [1, 2, 7, bytes.length]) {
    const body = new ReadableStream<Uint8Array>({
      start(control) {
        for (let place = 0; place < bytes.length; place += size) control.enqueue(bytes.slice(place, place + size));
        control.close();
      },
    });
    const found: string[] = [];
    for await (const { event, data } of readEvents(body)) found.push(event + data);
    assert.deepEqual(found, ['stdout{"text": "é"}', "exit1"]);
  }
});

test("a page that is logged in by cookie says so as Jupyter wants it", async () => {
  const sent: RequestInit[] = [];
  const page = globalThis as { document?: { cookie: string } };
  page.document = { cookie: "a=b; _xsrf=2|abc" };
  const fake: typeof fetch = async (_, init) => {
    sent.push(init!);
    return Response.json({ sandboxes: [] });
  };
  await new AgentboxClient({ url, fetch: fake }).list();
  delete page.document;
  assert.deepEqual(sent[0]!.headers, { "X-XSRFToken": "2|abc" });
  assert.equal(sent[0]!.credentials, "same-origin");
});
