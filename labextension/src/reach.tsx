/** The Network tab and its notifications: allowed hosts, connection attempts and requests of agents. */
import { Notification } from '@jupyterlab/apputils';
import { PathExt } from '@jupyterlab/coreutils';
import * as React from 'react';

import type { AgentboxError } from '../../clients/typescript/src/index.js';
import type { Actions } from './actions.js';
import { Ago } from './facts.js';
import { useFetched, useSignal } from './hooks.js';
import type { Model, Refused } from './model.js';
import { countHosts } from './rows.js';
import type { Part } from './view.js';
import { formatSize, idOf, shorten, type Info } from './words.js';

/** Allow one more host for a sandbox. Throws if policy does not permit it. */
export async function allow(model: Model, info: Info, host: string): Promise<void> {
  const path = { id: idOf(info) };
  const { hosts } = await model.client.call('get_egress', { path });
  await model.client.call('patch_sandbox', { path, body: { allowed_hosts: [...hosts.filter(item => item !== host), host] } });
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

  private async _notify({ sandbox, host }: Refused): Promise<void> {
    const { model } = this;
    const { trans } = model;
    const key = `${sandbox} ${host}`;
    const info = model.find(sandbox);
    if (!info || !this.isWanted() || this._notified.has(key) || this._notified.size > 1000) {
      return;
    }
    this._notified.add(key);
    let verdict;
    try {
      ({ verdict } = await model.client.call('get_egress', { path: { id: idOf(info) }, query: { host } }));
    } catch {
      return; // the sandbox has ended
    }
    const name = PathExt.basename(this.actions.name(info)).slice(0, 24);
    const refusal = (text: string): string => trans.__('A connection from %1 to %2 was blocked.', name, text);
    if (!verdict?.may_allow) {
      const ask = trans.__('Ask the server administrator to allow it (%1).', verdict?.setting ?? 'Policy.allowed_hosts');
      Notification.warning(shorten(text => `${refusal(text)} ${ask}`, host), {
        autoClose: false,
        actions: [{ label: trans.__('Show'), callback: () => void this.actions.run('details', info) }]
      });
      return;
    }
    Notification.warning(shorten(refusal, host), {
      autoClose: false,
      actions: [
        {
          label: trans.__('Allow for This Sandbox'),
          displayType: 'accent',
          callback: () => {
            allow(model, info, host).then(
              () => {
                this._notified.delete(key);
                Notification.success(trans.__('%1 can now connect to %2. Run the cell again.', name, host), { autoClose: 5000 });
              },
              (error: unknown) => {
                this.actions.showError(error);
              }
            );
          }
        },
        { label: trans.__('Show'), callback: () => void this.actions.run('details', info) }
      ]
    });
  }
}

export function Reach({ info, model, actions }: Part): JSX.Element {
  const { trans } = model;
  const { value, problem, again } = useFetched(async () => {
    const path = { id: idOf(info) };
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
  if (!value) {
    return <p role="status">{problem || trans.__('Loading…')}</p>;
  }
  const tryAllow = (host: string): void => {
    allow(model, info, host).then(
      () => {
        setStatus(trans.__('%1 is now allowed for this sandbox.', host));
      },
      (error: unknown) => {
        const { message, setting } = error as AgentboxError;
        const ask = setting && !message.includes(setting) ? trans.__('Ask the server administrator to allow it (%1).', setting) : trans.__('Ask the server administrator to allow it.');
        setStatus(setting ? `${message}. ${ask}` : message);
      }
    );
  };
  const decide = (ask: string, decision: 'allow' | 'deny'): void => {
    model.client.call('decide_ask', { path: { id: idOf(info), ask }, body: { decision } }).then(again, (error: unknown) => {
      actions.showError(error);
    });
  };
  const granted = new Set(info.allowed_hosts);
  return (
    <>
      <h2>{trans.__('Allowed hosts')}</h2>
      <p>{info.allowed_hosts.join(', ') || trans.__('None')}</p>
      {value.grant && (
        <p className="ab-dim">
          {trans.__('Hosts that can be allowed: %1 (setting: %2).', value.grant.ceiling.join(', ') || trans.__('none'), value.grant.setting)}
        </p>
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
              {trans.__('Allow for This Sandbox')}
            </button>
            <button type="button" className="ab-button" onClick={() => {
              decide(ask.id, 'deny');
            }}>
              {trans.__('Deny')}
            </button>
          </div>
        </div>
      ))}
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
              <th scope="col">{trans.__('Actions')}</th>
            </tr>
          </thead>
          <tbody>
            {value.hosts.map(item => (
              <tr key={item.host} className={item.denied > 0 && !granted.has(item.host) ? 'ab-mod-refused' : ''} title={item.reason}>
                <th scope="row">{item.host}</th>
                <td>{item.allowed}</td>
                <td>{item.denied}</td>
                <td>{`${formatSize(item.bytesUp)} / ${formatSize(item.bytesDown)}`}</td>
                <td>
                  <Ago time={item.last} trans={trans} />
                </td>
                <td>
                  {item.denied > 0 && !granted.has(item.host) && (
                    <button
                      type="button"
                      className="ab-button"
                      aria-label={trans.__('Allow %1 for this sandbox', item.host)}
                      onClick={() => {
                        tryAllow(item.host);
                      }}
                    >
                      {trans.__('Allow')}
                    </button>
                  )}
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
    </>
  );
}
