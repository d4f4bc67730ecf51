import { strict as assert } from 'node:assert';
import { test } from 'node:test';

import { countHosts, findCurrentUse, findEnding, listOperations, type Row } from '../src/rows.js';
import { cpuShare, explain, factsOf, fits, formatAge, formatCpu, formatKind, formatReach, formatSize, idOf, nameOf, recipeOf, shorten, targetOf, type Info, type Trans } from '../src/words.js';

const fill = (text: string, values: (string | number)[]): string => text.replace(/%(\d)/g, (_, index: string) => String(values[Number(index) - 1]));
const trans: Trans = {
  __: (text, ...values) => fill(text, values),
  _n: (one, many, count, ...values) => fill(count === 1 ? one : many, [count, ...values])
};

const info = {
  id: 'box',
  kind: 'session',
  state: 'running',
  profile: 'default',
  runtime: 'runsc',
  limits: { memory: 2 ** 32, cpus: 4, processes: 10, disk: 2 ** 30 },
  labels: { task: 'report' },
  kernels: [{ id: 'k1', state: 'running' }],
  calls: []
} as unknown as Info;
const row = (values: Partial<Row>): Row => ({ kind: 'egress', host: null, detail: {}, time: 0, is_allowed: null, ...values }) as Row;

test('file types have labels', () => {
  assert.deepEqual((['file', 'directory', 'fifo'] as const).map(kind => formatKind(kind, trans)), ['file', 'folder', 'named pipe']);
});

test('sizes are formatted in their largest unit', () => {
  const shown = [0, 1023, 1024, 1536, 212 * 2 ** 20, 4 * 2 ** 30, 2 ** 30 - 1].map(formatSize);
  assert.deepEqual(shown, ['0 B', '1023 B', '1 KB', '1.5 KB', '212 MB', '4 GB', '1.0 GB']);
});

test('durations are formatted in their largest unit', () => {
  assert.deepEqual([-5, 59, 60, 7300, 86400, 200000].map(seconds => formatAge(seconds, trans)), ['0 s', '59 s', '1 min', '2 h', '1 day', '2 days']);
});

test('allowed hosts are summarized', () => {
  assert.equal(formatReach([], trans), 'network: none');
  assert.equal(formatReach(['pypi'], trans), 'network: pypi');
  assert.equal(formatReach(['a', 'b', 'c'], trans), 'network: a and 2 more');
  assert.equal(formatReach(['*'], trans), 'network: all hosts');
});

test('CPU use is measured between two samples', () => {
  const before = { memory: 0, disk: 0, cpu: 1, time: 10 };
  assert.equal(cpuShare(undefined, before), undefined);
  assert.equal(cpuShare(before, before), undefined);
  assert.equal(cpuShare(before, { ...before, cpu: 0, time: 12 }), undefined);
  assert.equal(cpuShare(before, { ...before, cpu: 4, time: 12 }), 1.5);
  assert.equal(formatCpu(1.5, info, trans), 'CPU 1.5 of 4');
});

test('every cause of an end has its own explanation, with the setting that changes it', () => {
  const causes = ['exited', 'killed', 'crashed', 'out_of_memory', 'disk_full', 'lease_over', 'stopped', 'idle', 'life_over', 'lost', 'runtime_failed'];
  const shown = causes.map(cause => explain({ cause, message: '', setting: '' }, trans).why);
  assert.equal(new Set(shown).size, causes.length);
  assert.equal(explain({ cause: 'exited', message: '', setting: '' }, trans).why, 'The kernel exited.');
  assert.match(explain({ cause: 'out_of_memory', message: '', setting: 'Policy.max_memory' }, trans).what, /Policy\.max_memory/);
});

test('the name and id of a sandbox are those of its notebook, if it has one', () => {
  assert.equal(nameOf(info, new Map([['k1', 'a.ipynb']]), trans), 'a.ipynb');
  assert.equal(nameOf(info, new Map(), trans), 'box');
  assert.equal(idOf(info), 'box');
  assert.equal(idOf({ ...info, kind: 'notebook' }), 'k1');
});

test('a filter matches words anywhere and requires all of them', () => {
  assert.equal(fits(info, 'a.ipynb', ''), true);
  assert.equal(fits(info, 'a.ipynb', 'REPORT run'), true);
  assert.equal(fits(info, 'a.ipynb', 'report parked'), false);
});

test('connections are counted by host, refused hosts first', () => {
  const rows = [
    row({ host: 'a', is_allowed: true, time: 1 }),
    row({ host: 'a', kind: 'egress_closed', bytes_up: 10, bytes_down: 20, time: 9 }),
    row({ host: 'b', is_allowed: false, reason: 'no', time: 2 }),
    row({ host: 'b', is_allowed: false, reason: 'still no', time: 3 }),
    row({ kind: 'call', host: 'c' })
  ];
  const [b, a, ...rest] = countHosts(rows);
  assert.deepEqual(rest, []);
  assert.deepEqual(b, { host: 'b', allowed: 0, denied: 2, bytesUp: 0, bytesDown: 0, last: 3, reason: 'still no' });
  assert.deepEqual(a, { host: 'a', allowed: 1, denied: 0, bytesUp: 10, bytesDown: 20, last: 9, reason: '' });
});

test('operations are listed newest first, with their tokens', () => {
  const rows = [
    row({ kind: 'call', time: 1, duration: 2, detail: { tool: 'bash', by: 'me' } }),
    row({ kind: 'call', time: 2, reason: 'Conflict', detail: { tool: 'read', by: 'me', token_name: 'agent', extra: 1 } }),
    row({ kind: 'grant' })
  ];
  assert.deepEqual(listOperations(rows), [
    { time: 2, tool: 'read', by: 'me', token: 'agent', duration: 0, problem: 'Conflict', count: 1 },
    { time: 1, tool: 'bash', by: 'me', token: '', duration: 2, problem: '', count: 1 }
  ]);
  const often = [1, 2, 3].map(time => row({ kind: 'call', time, detail: { tool: time < 3 ? 'list' : 'read', by: 'me' } }));
  assert.deepEqual(
    listOperations(often).map(({ tool, time, count }) => [tool, time, count]),
    [
      ['read', 3, 1],
      ['list', 2, 2]
    ]
  );
});

test('the end of a kernel is its last row in the log', () => {
  const of = (event: string, kernel_id: string, cause = ''): Row =>
    row({ kind: 'lifecycle', sandbox: 'box', time: 7, detail: { event, kernel_id, cause, message: 'it was', setting: '' } });
  const rows = [of('started', 'k1'), of('ended', 'k1', 'stopped'), of('ended', 'k2', 'idle'), of('parked', '')];
  assert.deepEqual(findEnding(rows, 'k1'), { kernel: 'k1', sandbox: 'box', cause: 'stopped', message: 'it was', setting: '', time: 7 });
  assert.equal(findEnding(rows, 'k2')?.cause, 'idle');
  assert.equal(findEnding([...rows, of('started', 'k2')], 'k2'), undefined);
  assert.equal(findEnding(rows, 'k3'), undefined);
});

test('the facts of an end are taken from the message of the server', () => {
  assert.equal(factsOf('disk full (limit 64 MiB, used 64 MiB)'), 'limit 64 MiB, used 64 MiB');
  assert.equal(factsOf('the kernel was killed (SIGKILL) by a program inside'), 'the kernel was killed (SIGKILL) by a program inside');
});

test('an agent takes precedence over other users of a kernel', () => {
  const call = { tool: 'run_code', by: 'me', token: null, since: 5 };
  assert.deepEqual(findCurrentUse(info, false), { kind: 'none' });
  assert.deepEqual(findCurrentUse(info, true), { kind: 'person' });
  assert.deepEqual(findCurrentUse({ ...info, calls: [call] }, true), { kind: 'program', name: 'me', tool: 'run_code', since: 5 });
  const agents = [call, { ...call, token: 'helper' }];
  assert.deepEqual(findCurrentUse({ ...info, calls: agents }, true), { kind: 'agent', name: 'helper', tool: 'run_code', since: 5 });
});

test('a long host name is cut at its start', () => {
  const format = (host: string): string => `${host} was refused`;
  assert.equal(shorten(format, 'a.example'), 'a.example was refused');
  const cut = shorten(format, `${'a'.repeat(200)}.example.org`, 60);
  assert.equal(cut.length, 60);
  assert.match(cut, /^…a+\.example\.org was refused$/);
});

test('the lines that raise a limit are written out', () => {
  const ending = { cause: 'out_of_memory', message: 'out of memory (limit 300 MiB)', setting: 'memory of the profile, Policy.max_memory' };
  assert.equal(recipeOf(ending, 'small'), 'c.Policy.max_memory = "600 MiB"\nc.Policy.profiles.update({"small": {"memory": "600 MiB"}})');
  assert.match(recipeOf({ ...ending, cause: 'disk_full', message: 'disk full (limit 2 GiB, used 3 GiB)' }, 'default'), /^c\.Policy\.max_disk = "4 GiB"\n/);
  assert.equal(recipeOf({ ...ending, setting: 'Policy.min_free_disk' }, 'small'), '');
  assert.equal(recipeOf({ ...ending, cause: 'exited' }, 'small'), '');
});

test('a host is allowed with its port, unless that is 80 or 443', () => {
  assert.deepEqual([0, null, 80, 443, 5432].map(port => targetOf('a.test', port)), ['a.test', 'a.test', 'a.test', 'a.test', 'a.test:5432']);
});
