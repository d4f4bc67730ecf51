/** The Network tab and its notifications: allowed hosts, blocked hosts, connection attempts and requests of agents. */
import { Notification } from '@jupyterlab/apputils';
import { PathExt } from '@jupyterlab/coreutils';
import * as React from 'react';

import type { components } from '../../clients/typescript/src/schema.js';
import type { Actions } from './actions.js';
import { Ago } from './facts.js';
import { useFetched, useSignal } from './hooks.js';
import type { Model, Refused } from './model.js';
import { countHosts } from './rows.js';
import type { Part } from './view.js';
import { formatSize, idOf, limitLines, shorten, targetOf, type Info, type Trans } from './words.js';

type Rule = components['schemas']['HostRule'];
type Scope = Rule['scope'];
type Verdict = components['schemas']['HostVerdict'];

/** Return the label of the button that allows a host for `scope`. */
function labelOf(scope: Scope, info: Info, trans: Trans): string {
  return {
    kernel: info.kind === 'notebook' ? trans.__('Allow for This Kernel') : trans.__('Allow for This Sandbox'),
    notebook: trans.__('Allow for This Notebook'),
    always: trans.__('Always Allow')
  }[scope];
}

/** Return what a rule covers, such as `always, with profile default`. */
function coverOf(rule: Rule, trans: Trans): string {
  return {
    kernel: trans.__('for kernel %1', rule.target.slice(0, 8)),
    notebook: trans.__('for %1', PathExt.basename(rule.target)),
    always: trans.__('always, with profile %1', rule.target)
  }[rule.scope];
}

/** Allow one more host for a sandbox. Throws if policy does not permit it. */
async function allow(model: Model, info: Info, host: string, scope: Scope): Promise<void> {
  await model.client.call('allow_host', { path: { id: idOf(info) }, body: { host, scope } });
  model.refreshSoon();
}

/** Notify the user of blocked connections as they happen, once for each host of a sandbox. */
export class Notices {
  private readonly _notified = new Set<string>();

  constructor(
    private readonly model: Model,
    private readonly actions: Actions,
    private readonly isWanted: () => boolean
  ) {
    model.refused.connect((_, refused) => {
      void this._notify(refused);
    });
  }

  private async _notify({ sandbox, host: name, port }: Refused): Promise<void> {
    const { model } = this;
    const { trans } = model;
    const host = targetOf(name, port);
    const key = `${sandbox} ${host}`;
    const info = model.find(sandbox);
    if (!info || !this.isWanted() || this._notified.has(key) || this._notified.size > 1000) {
      return;
    }
    this._notified.add(key);
    let verdict: Verdict | null | undefined;
    try {
      ({ verdict } = await model.client.call('get_egress', { path: { id: idOf(info) }, query: { host } }));
    } catch {
      return; // the sandbox has ended
    }
    const label = PathExt.basename(this.actions.name(info)).slice(0, 24);
    const refusal = (text: string): string => trans.__('A connection from %1 to %2 was blocked.', label, text);
    const show = { label: trans.__('Show'), callback: () => void this.actions.run('details', info) };
    if (!verdict?.may_allow) {
      const ask = trans.__('Ask your administrator to add it to %1.', verdict?.setting ?? 'Policy.allowed_hosts');
      Notification.warning(shorten(text => `${refusal(text)} ${ask}`, host), { autoClose: false, actions: [show] });
      return;
    }
    const choices = verdict.scopes.map(scope => ({
      label: labelOf(scope, info, trans),
      callback: () => {
        allow(model, info, host, scope).then(
          () => {
            this._notified.delete(key);
            Notification.success(trans.__('%1 can now connect to %2. Run the cell again.', label, host), { autoClose: 5000 });
          },
          (error: unknown) => {
            this.actions.showError(error);
          }
        );
      }
    }));
    Notification.warning(shorten(refusal, host), { autoClose: false, actions: [...choices, show] });
  }
}

/** A host with a button for each scope for which the user may allow it, or the reason why not. */
function Choice({ info, model, verdict, onDone }: { info: Info; model: Model; verdict: Verdict; onDone: (text: string) => void }): JSX.Element {
  const { trans } = model;
  const pick = (scope: Scope): void => {
    allow(model, info, verdict.host, scope).then(
      () => {
        onDone(trans.__('%1 is now allowed. Run the cell again.', verdict.host));
      },
      (error: unknown) => {
        onDone((error as Error).message);
      }
    );
  };
  return (
    <div className="ab-ask">
      <span>
        <strong>{verdict.host}</strong> {verdict.message}
      </span>
      <div className="ab-row-actions">
        {verdict.scopes.map(scope => (
          <button
            type="button"
            className="ab-button"
            key={scope}
            onClick={() => {
              pick(scope);
            }}
          >
            {labelOf(scope, info, trans)}
          </button>
        ))}
      </div>
    </div>
  );
}

/** Hosts that a person allowed, each with a button that revokes it. */
function Rules({ rules, model, onRevoke }: { rules: readonly Rule[]; model: Model; onRevoke: (rule: Rule) => void }): JSX.Element {
  const { trans } = model;
  return (
    <ul className="ab-rules">
      {rules.map(rule => (
        <li key={`${rule.host} ${rule.scope} ${rule.target}`} title={rule.target}>
          <span>
            <strong>{rule.host}</strong> {coverOf(rule, trans)}
          </span>
          <button
            type="button"
            className="ab-button"
            aria-label={trans.__('Revoke %1', rule.host)}
            onClick={() => {
              onRevoke(rule);
            }}
          >
            {trans.__('Revoke')}
          </button>
        </li>
      ))}
    </ul>
  );
}

/** All hosts that the user allowed, for the side panel. */
export function AllowedHosts({ model, actions }: { model: Model; actions: Actions }): JSX.Element {
  const { trans } = model;
  const [isOpen, setOpen] = React.useState(false);
  const { value, problem, again } = useFetched(
    async () => (isOpen ? (await model.client.call('list_allowed_hosts', {})).rules : []),
    String(isOpen)
  );
  useSignal(model.changed, () => {
    if (isOpen) {
      again();
    }
  });
  const revoke = ({ host, scope, target }: Rule): void => {
    model.client.call('revoke_allowed_host', { query: { host, scope, target } }).then(again, (error: unknown) => {
      actions.showError(error);
    });
  };
  return (
    <details
      className="ab-allowed"
      onToggle={event => {
        setOpen(event.currentTarget.open);
      }}
    >
      <summary>{trans.__('Hosts that you allowed')}</summary>
      {problem && <p role="status">{problem}</p>}
      {value?.length === 0 && <p>{trans.__('None')}</p>}
      <Rules rules={value ?? []} model={model} onRevoke={revoke} />
    </details>
  );
}

/** The lines of configuration for an API key and for more memory. */
function Recipes({ info, model }: { info: Info; model: Model }): JSX.Element {
  const { trans, settingsFile } = model;
  const memory = `${2 * Math.ceil((info.limits?.memory ?? 0) / 2 ** 20)} MiB`;
  return (
    <details className="ab-recipe">
      <summary>{trans.__('API keys and more memory')}</summary>
      <p>{trans.__('Add the lines to %1, and restart the kernel.', settingsFile)}</p>
      <p>{trans.__('To pass on an API key, set its variable before you start JupyterLab. Code inside can read it, and send it to every allowed host.')}</p>
      <pre>c.Policy.env_passthrough = [&quot;EXAMPLE_API_KEY&quot;]</pre>
      <p>{trans.__('To allow %1 of memory:', memory)}</p>
      <pre>{limitLines('memory', memory, info.profile)}</pre>
    </details>
  );
}

export function Reach({ info, model, actions }: Part): JSX.Element {
  const { trans } = model;
  const path = { id: idOf(info) };
  const { value, problem, again } = useFetched(async () => {
    const [log, grant, asks] = await Promise.all([
      model.client.call('get_egress_log', { path, query: { limit: 5000 } }),
      info.state === 'running' ? model.client.call('get_egress', { path }) : undefined,
      model.client.call('list_asks', { path })
    ]);
    const hosts = countHosts(log.rows);
    return { hosts, grant, asks: asks.asks.filter(ask => ask.state === 'pending') };
  }, `${info.sandbox_id ?? ''} ${info.state} ${info.allowed_hosts.join()}`);
  useSignal(model.touched, sandbox => {
    if (sandbox === info.sandbox_id) {
      again();
    }
  });
  const [status, setStatus] = React.useState('');
  const [typed, setTyped] = React.useState('');
  const [extra, setExtra] = React.useState<Verdict>();
  if (!value) {
    return <p role="status">{problem || trans.__('Loading…')}</p>;
  }
  const { grant } = value;
  const done = (text: string): void => {
    setStatus(text);
    setExtra(undefined);
    again();
  };
  const revoke = ({ host, scope }: Rule): void => {
    model.client.call('revoke_host', { path, query: { host, scope } }).then(
      () => {
        model.refreshSoon();
        done(trans.__('%1 is no longer allowed. Open connections to it were closed.', host));
      },
      (error: unknown) => {
        setStatus((error as Error).message);
      }
    );
  };
  const look = (event: React.FormEvent): void => {
    event.preventDefault();
    model.client.call('get_egress', { path, query: { host: typed.trim() } }).then(
      ({ verdict }) => {
        setStatus('');
        setExtra(verdict ?? undefined);
      },
      (error: unknown) => {
        setStatus((error as Error).message);
      }
    );
  };
  const decide = (ask: string, decision: 'allow' | 'deny'): void => {
    model.client.call('decide_ask', { path: { ...path, ask }, body: { decision } }).then(again, (error: unknown) => {
      actions.showError(error);
    });
  };
  const blocked = new Set(grant?.refused.map(verdict => verdict.host));
  return (
    <>
      <h2>{trans.__('Allowed hosts')}</h2>
      <p>{info.allowed_hosts.join(', ') || trans.__('None')}</p>
      {grant && grant.rules.length > 0 && (
        <>
          <p className="ab-dim">{trans.__('Of these, you allowed:')}</p>
          <Rules rules={grant.rules} model={model} onRevoke={revoke} />
        </>
      )}
      <p role="status" aria-live="polite">
        {status}
      </p>
      {value.asks.map(ask => (
        <div key={ask.id} className="ab-ask">
          <span>{ask.why ? trans.__('An agent requests access to %1: %2', ask.host, ask.why) : trans.__('An agent requests access to %1', ask.host)}</span>
          <div className="ab-row-actions">
            <button type="button" className="ab-button" onClick={() => {
              decide(ask.id, 'allow');
            }}>
              {labelOf('kernel', info, trans)}
            </button>
            <button type="button" className="ab-button" onClick={() => {
              decide(ask.id, 'deny');
            }}>
              {trans.__('Deny')}
            </button>
          </div>
        </div>
      ))}
      {grant && grant.refused.length > 0 && (
        <>
          <h2>{trans.__('Blocked hosts')}</h2>
          {grant.refused.map(verdict => (
            <Choice key={verdict.host} info={info} model={model} verdict={verdict} onDone={done} />
          ))}
        </>
      )}
      {grant && grant.may_allow.length > 0 && (
        <form className="ab-allow" onSubmit={look}>
          <input
            className="ab-input"
            aria-label={trans.__('Another host')}
            placeholder={trans.__('Another host, such as db.example.org:5432')}
            value={typed}
            onKeyDown={event => {
              event.stopPropagation();
            }}
            onChange={event => {
              setTyped(event.target.value);
            }}
          />
          <button type="submit" className="ab-button" disabled={!typed.trim()}>
            {trans.__('Allow…')}
          </button>
        </form>
      )}
      {extra && <Choice info={info} model={model} verdict={extra} onDone={done} />}
      <h2>{trans.__('Connection attempts')}</h2>
      {value.hosts.length === 0 && <p>{trans.__('No connection attempts yet.')}</p>}
      {value.hosts.length > 0 && (
        <table className="ab-table">
          <thead>
            <tr>
              <th scope="col">{trans.__('Host')}</th>
              <th scope="col">{trans.__('Allowed')}</th>
              <th scope="col">{trans.__('Blocked')}</th>
              <th scope="col">{trans.__('Sent / received')}</th>
              <th scope="col">{trans.__('Last attempt')}</th>
            </tr>
          </thead>
          <tbody>
            {value.hosts.map(item => (
              <tr key={item.host} className={blocked.has(item.host) ? 'ab-mod-refused' : ''} title={item.reason}>
                <th scope="row">{item.host}</th>
                <td>{item.allowed}</td>
                <td>{item.denied}</td>
                <td>{`${formatSize(item.bytesUp)} / ${formatSize(item.bytesDown)}`}</td>
                <td>
                  <Ago time={item.last} trans={trans} />
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
      {model.settingsFile && <Recipes info={info} model={model} />}
    </>
  );
}
