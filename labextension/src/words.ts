/** Sentences and numbers for people. Nothing here knows of JupyterLab, so that it is tested without a browser. */
import type { components } from '../../clients/typescript/src/schema.js';

type Schemas = components['schemas'];
export type Info = Schemas['SandboxInfo'];
export type Usage = NonNullable<Info['usage']>;

/** The part of a JupyterLab translation bundle that is used. */
export interface Trans {
  __(text: string, ...values: (string | number)[]): string;
  _n(one: string, many: string, count: number, ...values: (string | number)[]): string;
}

/** Why a kernel is no more, as the server's event tells it. */
export interface Ending {
  kernel: string;
  /** Empty where no event has told of it. */
  sandbox: string;
  cause: string;
  message: string;
  setting: string;
  time: number;
}

/** Write a number of bytes: `212 MB`, `4 GB`. */
export function formatSize(bytes: number): string {
  for (const [power, unit] of [
    [3, 'GB'],
    [2, 'MB'],
    [1, 'KB']
  ] as const) {
    const value = bytes / 1024 ** power;
    // What would be written as 1024 of a unit is 1 of the next.
    if (Math.round(bytes / 1024 ** (power - 1)) >= 1024) {
      return `${value >= 10 || Number.isInteger(value) ? Math.round(value) : value.toFixed(1)} ${unit}`;
    }
  }
  return `${Math.round(bytes)} B`;
}

/** Write a time span in seconds by its largest unit. */
export function formatAge(seconds: number, trans: Trans): string {
  const whole = Math.max(0, Math.floor(seconds));
  if (whole < 60) {
    return trans.__('%1 s', whole);
  }
  if (whole < 3600) {
    return trans.__('%1 min', Math.floor(whole / 60));
  }
  if (whole < 86400) {
    return trans.__('%1 h', Math.floor(whole / 3600));
  }
  return trans._n('%1 day', '%1 days', Math.floor(whole / 86400));
}

/** Say what a sandbox may reach, in a few words. */
export function formatReach(hosts: readonly string[], trans: Trans): string {
  const [first] = hosts;
  if (first === undefined) {
    return trans.__('can reach nothing');
  }
  if (first === '*') {
    return trans.__('can reach every host');
  }
  if (hosts.length === 1) {
    return trans.__('can reach: %1', first);
  }
  return trans._n('can reach: %2 and %1 more', 'can reach: %2 and %1 more', hosts.length - 1, first);
}

/** Processors' worth of time between two measurements; undefined while there is one only. */
export function cpuShare(before: Usage | undefined, now: Usage): number | undefined {
  if (before === undefined || now.time <= before.time || now.cpu < before.cpu) {
    return undefined;
  }
  return (now.cpu - before.cpu) / (now.time - before.time);
}

export function formatMemory(info: Info, trans: Trans): string {
  if (!info.usage || !info.limits) {
    return '';
  }
  return trans.__('%1 of %2', formatSize(info.usage.memory), formatSize(info.limits.memory));
}

export function formatCpu(share: number | undefined, info: Info, trans: Trans): string {
  if (!info.limits || share === undefined) {
    return '';
  }
  return trans.__('CPU %1 of %2', share.toFixed(1), String(info.limits.cpus));
}

/** A program's state in a word of the language. */
export function formatState(state: Info['state'], trans: Trans): string {
  return {
    starting: trans.__('starting'),
    running: trans.__('running'),
    parked: trans.__('parked'),
    ended: trans.__('ended'),
    lost: trans.__('lost'),
    unknown: trans.__('unknown: what runs it does not answer')
  }[state];
}

/** What an entry of a folder is. */
export function formatKind(kind: Schemas['Entry']['kind'], trans: Trans): string {
  return {
    file: trans.__('file'),
    directory: trans.__('folder'),
    link: trans.__('link'),
    fifo: trans.__('named pipe'),
    socket: trans.__('socket'),
    device: trans.__('device')
  }[kind];
}

/** Say why it ended, and what to do about it. */
export function explain(ending: Pick<Ending, 'cause' | 'message' | 'setting'>, trans: Trans): { why: string; what: string } {
  const ask = ending.setting ? ' ' + trans.__('Whoever runs this server can change it: %1.', ending.setting) : '';
  switch (ending.cause) {
    case 'out_of_memory':
      return {
        why: trans.__('The kernel ran out of memory.'),
        what: trans.__('Work on less data at a time, or ask for more memory.') + ask
      };
    case 'disk_full':
      return {
        why: trans.__('The kernel filled its disk.'),
        what: trans.__('Write less, or delete files that you do not need.') + ask
      };
    case 'life_over':
      return { why: trans.__('The time of the sandbox was over.'), what: trans.__('Run your cells again.') + ask };
    case 'idle':
      return { why: trans.__('The kernel was not used for long, and was shut down.'), what: trans.__('Run your cells again.') + ask };
    case 'killed':
      return {
        why: trans.__('The kernel was killed, by a program inside or by an operator.'),
        what: trans.__('Run your cells again. Ask whoever runs this server if it happens again.')
      };
    case 'crashed':
      return { why: trans.__('The kernel crashed.'), what: trans.__('Run your cells again, and look at the last cell that ran.') };
    case 'stopped':
      return {
        why: trans.__('The kernel was shut down.'),
        what: trans.__('An operator or another window did it. Start a new one and run your cells again.')
      };
    case 'lease_over':
      return {
        why: trans.__('The server was away, and the kernel ended meanwhile.'),
        what: trans.__('Start a new one and run your cells again. For how long a sandbox outlives its server is set by %1.', 'Policy.lease_timeout')
      };
    case 'exited':
      return { why: trans.__('The kernel left by itself.'), what: trans.__('Look for exit() or the like in the last cell that ran.') };
    case 'lost':
      return {
        why: trans.__('The record of the sandbox on disk is damaged.'),
        what: trans.__('Delete the sandbox, which removes its files.')
      };
    default:
      return { why: trans.__('The kernel ended.'), what: trans.__('Run your cells again.') + ask };
  }
}

/** Of a server's sentence on an end, what the one by {@link explain} does not say: `limit 300 MiB`. */
export function factsOf(message: string): string {
  return /^[^()]*\(([^()]*)\)$/.exec(message)?.[1] ?? message;
}

/** The id to call a sandbox by: of a notebook's that of its kernel, since its own is another after each restart. */
export function idOf(info: Info): string {
  return info.kind === 'notebook' ? (info.kernels[0]?.id ?? info.id) : info.id;
}

/** Name a sandbox: by its notebook's path, or by its id. */
export function nameOf(info: Info, paths: ReadonlyMap<string, string>, trans: Trans): string {
  for (const kernel of info.kernels) {
    const path = paths.get(kernel.id);
    if (path !== undefined) {
      return path;
    }
  }
  return info.kind === 'notebook' ? trans.__('A kernel without a notebook') : info.id;
}

/** Say a sentence about a host in as many characters as a notice has, be the host's name long: its end tells most. */
export function sayShortly(say: (host: string) => string, host: string, most = 140): string {
  const excess = say(host).length - most;
  return excess <= 0 ? say(host) : say('…' + host.slice(Math.max(0, Math.min(excess + 1, host.length - 12))));
}

/** Whether all words of a filter are found in what is known of a sandbox. */
export function fits(info: Info, name: string, filter: string): boolean {
  const text = [name, info.id, info.state, info.profile, info.runtime, info.kind, ...Object.entries(info.labels).flat()].join(' ').toLowerCase();
  return filter
    .toLowerCase()
    .split(/\s+/)
    .every(word => text.includes(word));
}
