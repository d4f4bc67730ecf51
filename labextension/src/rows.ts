/** Summaries of audit log rows: connection counts by host, and operations with their callers. */
import type { components } from '../../clients/typescript/src/schema.js';
import { targetOf, type Ending, type Info } from './words.js';

export type Row = components['schemas']['AuditItem'];

/** Connection counts of one host. */
export interface HostCount {
  host: string;
  allowed: number;
  denied: number;
  bytesUp: number;
  bytesDown: number;
  /** Seconds since the epoch. */
  last: number;
  /** Why the most recent refused connection was refused. */
  reason: string;
}

/** Count connections by host, and by port other than 80 and 443. Hosts with refused connections come first, then the most recent. */
export function countHosts(rows: readonly Row[]): HostCount[] {
  const found = new Map<string, HostCount>();
  for (const row of rows) {
    if (row.host === null || (row.kind !== 'egress' && row.kind !== 'egress_closed')) {
      continue;
    }
    const host = targetOf(row.host, row.port);
    let count = found.get(host);
    if (count === undefined) {
      found.set(host, (count = { host, allowed: 0, denied: 0, bytesUp: 0, bytesDown: 0, last: 0, reason: '' }));
    }
    count.last = Math.max(count.last, row.time);
    count.bytesUp += row.bytes_up ?? 0;
    count.bytesDown += row.bytes_down ?? 0;
    if (row.kind === 'egress') {
      count[row.is_allowed ? 'allowed' : 'denied'] += 1;
      if (!row.is_allowed) {
        count.reason = row.reason ?? '';
      }
    }
  }
  return [...found.values()].sort((a, b) => Number(b.denied > 0) - Number(a.denied > 0) || b.last - a.last);
}

/** One API call on a sandbox. */
export interface Operation {
  time: number;
  tool: string;
  by: string;
  /** Name of the agent's token; empty if the caller used no token. */
  token: string;
  duration: number;
  problem: string;
  /** Number of consecutive identical calls; time and duration are those of the last one. */
  count: number;
}

/** List API calls, newest first, with consecutive identical calls merged. */
export function listOperations(rows: readonly Row[]): Operation[] {
  const operations: Operation[] = [];
  for (const row of rows) {
    if (row.kind !== 'call') {
      continue;
    }
    const operation = {
      time: row.time,
      tool: text(row.detail, 'tool'),
      by: text(row.detail, 'by'),
      token: text(row.detail, 'token_name'),
      duration: row.duration ?? 0,
      problem: row.reason ?? '',
      count: 1
    };
    const last = operations.at(-1);
    if (last && (['tool', 'by', 'token', 'problem'] as const).every(name => last[name] === operation[name])) {
      operation.count += last.count;
      operations.pop();
    }
    operations.push(operation);
  }
  return operations.reverse();
}

/** Return how a kernel ended, or undefined if its last row in the log is not an end. */
export function findEnding(rows: readonly Row[], kernel: string): Ending | undefined {
  const row = rows.filter(item => text(item.detail, 'kernel_id') === kernel).at(-1);
  if (row === undefined || text(row.detail, 'event') !== 'ended') {
    return undefined;
  }
  const [cause, message, setting] = ['cause', 'message', 'setting'].map(name => text(row.detail, name));
  return { kernel, sandbox: row.sandbox, cause: cause ?? '', message: message ?? '', setting: setting ?? '', time: row.time };
}

function text(detail: Row['detail'], name: string): string {
  const value = (detail as Record<string, unknown>)[name];
  return typeof value === 'string' ? value : '';
}

export type CurrentUse = { kind: 'agent' | 'program'; name: string; tool: string; since: number } | { kind: 'person' } | { kind: 'none' };

/** Return who is using a sandbox: the caller of a running API call, otherwise the notebook's user if its kernel is busy. */
export function findCurrentUse(info: Info, isBusy: boolean): CurrentUse {
  const call = info.calls.find(item => item.token !== null) ?? info.calls[0];
  if (call !== undefined) {
    return { kind: call.token === null ? 'program' : 'agent', name: call.token ?? call.by, tool: call.tool, since: call.since };
  }
  return { kind: isBusy ? 'person' : 'none' };
}
