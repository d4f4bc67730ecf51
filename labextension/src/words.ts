/** Texts and number formats of the UI. This file does not depend on JupyterLab, so it is tested without a browser. */
import type { components } from '../../clients/typescript/src/schema.js';

type Schemas = components['schemas'];
export type Info = Schemas['SandboxInfo'];
export type Usage = NonNullable<Info['usage']>;

/** The part of a JupyterLab translation bundle that is used. */
export interface Trans {
  __(text: string, ...values: (string | number)[]): string;
  _n(one: string, many: string, count: number, ...values: (string | number)[]): string;
}

/** Why a kernel ended, as reported by the server's event. */
export interface Ending {
  kernel: string;
  /** Empty if no event reported this end. */
  sandbox: string;
  cause: string;
  message: string;
  setting: string;
  time: number;
}

/** Format a number of bytes: `212 MB`, `4 GB`. */
export function formatSize(bytes: number): string {
  for (const [power, unit] of [
    [3, 'GB'],
    [2, 'MB'],
    [1, 'KB']
  ] as const) {
    const value = bytes / 1024 ** power;
    // A value that rounds to 1024 of one unit is written as 1 of the next.
    if (Math.round(bytes / 1024 ** (power - 1)) >= 1024) {
      return `${value >= 10 || Number.isInteger(value) ? Math.round(value) : value.toFixed(1)} ${unit}`;
    }
  }
  return `${Math.round(bytes)} B`;
}

/** Format a duration in seconds in its largest unit. */
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

/** Summarize the hosts that a sandbox can connect to. */
export function formatReach(hosts: readonly string[], trans: Trans): string {
  const [first] = hosts;
  if (first === undefined) {
    return trans.__('network: none');
  }
  if (first === '*') {
    return trans.__('network: all hosts');
  }
  if (hosts.length === 1) {
    return trans.__('network: %1', first);
  }
  return trans._n('network: %2 and %1 more', 'network: %2 and %1 more', hosts.length - 1, first);
}

/** Return the average number of CPUs used between two measurements, or undefined if there is only one. */
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

/** Return the label of a sandbox state. */
export function formatState(state: Info['state'], trans: Trans): string {
  return {
    starting: trans.__('starting'),
    running: trans.__('running'),
    parked: trans.__('parked'),
    ended: trans.__('ended'),
    lost: trans.__('lost'),
    unknown: trans.__('unknown (runtime not responding)')
  }[state];
}

/** Return the label of a file type. */
export function formatKind(kind: Schemas['Entry']['kind'], trans: Trans): string {
  return {
    file: trans.__('file'),
    directory: trans.__('folder'),
    link: trans.__('symbolic link'),
    fifo: trans.__('named pipe'),
    socket: trans.__('socket'),
    device: trans.__('device')
  }[kind];
}

/** Explain why a kernel ended (`why`) and what the user can do (`what`). */
export function explain(ending: Pick<Ending, 'cause' | 'message' | 'setting'>, trans: Trans): { why: string; what: string } {
  const hint = ending.setting ? ' ' + trans.__('A server administrator can change this setting: %1.', ending.setting) : '';
  switch (ending.cause) {
    case 'out_of_memory':
      return {
        why: trans.__('The kernel ran out of memory.'),
        what: trans.__('Process less data at a time, or allow more memory.') + hint
      };
    case 'disk_full':
      return {
        why: trans.__('The sandbox ran out of disk space.'),
        what: trans.__('Write less data, or delete files that you do not need.') + hint
      };
    case 'life_over':
      return { why: trans.__('The sandbox reached its maximum lifetime.'), what: trans.__('Run your cells again.') + hint };
    case 'idle':
      return { why: trans.__('The kernel was shut down because it was idle.'), what: trans.__('Run your cells again.') + hint };
    case 'killed':
      return {
        why: trans.__('The kernel was killed by a program in the sandbox or by an administrator.'),
        what: trans.__('Run your cells again. If this happens again, contact the server administrator.')
      };
    case 'crashed':
      return { why: trans.__('The kernel crashed.'), what: trans.__('Check the last cell that ran, then run your cells again.') };
    case 'stopped':
      return {
        why: trans.__('The kernel was shut down.'),
        what: trans.__('It was shut down by an administrator or from another window. Start a new kernel and run your cells again.')
      };
    case 'lease_over':
      return {
        why: trans.__('The kernel ended while the server was unavailable.'),
        what: trans.__('Start a new kernel and run your cells again. The setting %1 controls how long a sandbox keeps running without its server.', 'Policy.lease_timeout')
      };
    case 'exited':
      return { why: trans.__('The kernel exited.'), what: trans.__('Check the last cell that ran for a call such as exit().') };
    case 'lost':
      return {
        why: trans.__('The sandbox record on disk is damaged.'),
        what: trans.__('Delete the sandbox to remove its files.')
      };
    default:
      return { why: trans.__('The kernel ended.'), what: trans.__('Run your cells again.') + hint };
  }
}

/** Format a notice of the server about a sandbox that continues, such as a full disk. */
export function formatNotice(name: string, message: string, setting: string, trans: Trans): string {
  const sentence = `${name.slice(name.lastIndexOf('/') + 1).slice(0, 24)}: ${message}.`;
  return setting ? `${sentence} ${trans.__('Setting: %1.', setting)}` : sentence;
}

/** Return the lines of configuration that double the limit that a kernel exceeded, or an empty string. */
export function recipeOf(ending: Pick<Ending, 'cause' | 'message' | 'setting'>, profile: string): string {
  const key = { out_of_memory: 'memory', disk_full: 'disk' }[ending.cause];
  const limit = /\(limit ([0-9.]+) ([KMGT]iB)/.exec(ending.message);
  if (!key || !limit?.[1] || !ending.setting.includes('of the profile')) {
    return '';
  }
  return limitLines(key, `${2 * Number(limit[1])} ${limit[2] ?? ''}`, profile);
}

/** Return the lines of configuration that set a limit, such as `memory` to `8 GiB`. */
export function limitLines(key: string, size: string, profile: string): string {
  return `c.Policy.max_${key} = "${size}"\nc.Policy.profiles.update({"${profile}": {"${key}": "${size}"}})`;
}

/** Return the part of the server's message that {@link explain} does not cover, such as `limit 300 MiB`. */
export function factsOf(message: string): string {
  return /^[^()]*\(([^()]*)\)$/.exec(message)?.[1] ?? message;
}

/** Return the id for API calls. A notebook's sandbox gets a new id at each restart, so its kernel id is used. */
export function idOf(info: Info): string {
  return info.kind === 'notebook' ? (info.kernels[0]?.id ?? info.id) : info.id;
}

/** Return the display name of a sandbox: the path of its notebook, or its id. */
export function nameOf(info: Info, paths: ReadonlyMap<string, string>, trans: Trans): string {
  for (const kernel of info.kernels) {
    const path = paths.get(kernel.id);
    if (path !== undefined) {
      return path;
    }
  }
  return info.kind === 'notebook' ? trans.__('Kernel without a notebook') : info.id;
}

/** Return the host pattern with which a refused connection is allowed. A name lookup has no port. */
export function targetOf(host: string, port: number | null | undefined): string {
  return !port || port === 80 || port === 443 ? host : `${host}:${port}`;
}

/** Fit a sentence into a notification of `most` characters by cutting the start of a long host name. */
export function shorten(format: (host: string) => string, host: string, most = 140): string {
  const excess = format(host).length - most;
  return excess <= 0 ? format(host) : format('…' + host.slice(Math.max(0, Math.min(excess + 1, host.length - 12))));
}

/** Return whether every word of the filter occurs in the sandbox's name or properties. */
export function fits(info: Info, name: string, filter: string): boolean {
  const text = [name, info.id, info.state, info.profile, info.runtime, info.kind, ...Object.entries(info.labels).flat()].join(' ').toLowerCase();
  return filter
    .toLowerCase()
    .split(/\s+/)
    .every(word => text.includes(word));
}
