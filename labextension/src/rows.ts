/** What rows of the audit log come to: hosts with their counts, and who did what. */
import type { components } from '../../clients/typescript/src/schema.js';
import type { Ending, Info } from './words.js';

export type Row = components['schemas']['AuditItem'];

/** What became of one host. */
export interface HostCount {
  host: string;
  allowed: number;
  denied: number;
  bytesUp: number;
  bytesDown: number;
  /** Seconds since the epoch. */
  last: number;
  /** Why it was refused last. */
  reason: string;
}

/** Count decisions by host, those refused last first. */
export function countHosts(rows: readonly Row[]): HostCount[] {
  const found = new Map<string, HostCount>();
  for (const row of rows) {
    if (row.host === null || (row.kind !== 'egress' && row.kind !== 'egress_closed')) {
      continue;
    }
    let count = found.get(row.host);
    if (count === undefined) {
      found.set(row.host, (count = { host: row.host, allowed: 0, denied: 0, bytesUp: 0, bytesDown: 0, last: 0, reason: '' }));
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

/** One thing that was done to a sandbox. */
export interface Deed {
  time: number;
  tool: string;
  by: string;
  /** Name of the token that it was done with; empty for a person. */
  token: string;
  duration: number;
  problem: string;
  /** How often in a row, with nothing else between; time and duration are those of the last. */
  count: number;
}

/** What was called, newest first. */
export function listDeeds(rows: readonly Row[]): Deed[] {
  const deeds: Deed[] = [];
  for (const row of rows) {
    if (row.kind !== 'call') {
      continue;
    }
    const deed = {
      time: row.time,
      tool: text(row.detail, 'tool'),
      by: text(row.detail, 'by'),
      token: text(row.detail, 'token_name'),
      duration: row.duration ?? 0,
      problem: row.reason ?? '',
      count: 1
    };
    const last = deeds.at(-1);
    if (last && (['tool', 'by', 'token', 'problem'] as const).every(name => last[name] === deed[name])) {
      deed.count += last.count;
      deeds.pop();
    }
    deeds.push(deed);
  }
  return deeds.reverse();
}

/** How a kernel ended, if that is the last that was written of it. */
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

export type Driver = { kind: 'agent' | 'program'; name: string; tool: string; since: number } | { kind: 'person' } | { kind: 'nobody' };

/** Say who drives a sandbox now: whoever has a call on it, else whoever sits before the notebook whose kernel is busy. */
export function findDriver(info: Info, isBusy: boolean): Driver {
  const call = info.calls.find(item => item.token !== null) ?? info.calls[0];
  if (call !== undefined) {
    return { kind: call.token === null ? 'program' : 'agent', name: call.token ?? call.by, tool: call.tool, since: call.since };
  }
  return { kind: isBusy ? 'person' : 'nobody' };
}
