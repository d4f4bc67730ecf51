/** Who drives a sandbox, what agents did in it lately, and the tokens that they do it with. */
import * as React from 'react';

import { Ago } from './facts.js';
import { useFetched, useSignal } from './hooks.js';
import { findDriver, listDeeds, type Driver } from './rows.js';
import type { Part } from './view.js';
import { formatAge, type Trans, idOf } from './words.js';

function formatDriver(driver: Driver, trans: Trans): string {
  switch (driver.kind) {
    case 'agent':
      return trans.__('The agent with the token “%1” drives it now: %2, for %3.', driver.name, driver.tool, formatAge(Date.now() / 1000 - driver.since, trans));
    case 'program':
      return trans.__('A program of %1 drives it now: %2, for %3.', driver.name, driver.tool, formatAge(Date.now() / 1000 - driver.since, trans));
    case 'person':
      return trans.__('A person drives it now: a cell runs in the notebook.');
    case 'nobody':
      return trans.__('Nobody drives it now.');
  }
}

export function Activity({ info, model, actions }: Part): JSX.Element {
  const { trans } = model;
  const path = { id: idOf(info) };
  const { value, problem, again } = useFetched(async () => {
    const [log, tokens] = await Promise.all([
      model.client.call('get_sandbox_audit', { path, query: { kind: 'call', limit: 100 } }),
      info.state === 'running' ? model.client.call('list_tokens', { path }) : { tokens: [] }
    ]);
    return { deeds: listDeeds(log.rows), tokens: tokens.tokens };
  }, `${info.sandbox_id ?? ''} ${info.state}`);
  useSignal(model.touched, sandbox => {
    if (sandbox === info.sandbox_id) {
      again();
    }
  });
  const revoke = async (id: string, name: string): Promise<void> => {
    if (await actions.confirm(trans.__('Revoke the token “%1”?', name), trans.__('Whoever holds it can do nothing here any more.'), trans.__('Revoke'))) {
      await model.client.call('revoke_token', { path: { id: idOf(info), token: id } }).catch((error: unknown) => {
        actions.tell(error);
      });
      again();
    }
  };
  return (
    <>
      <p role="status" aria-live="polite" className="ab-driver">
        {formatDriver(findDriver(info, model.isBusy(info)), trans)}
      </p>
      {problem && <p role="alert">{problem}</p>}
      <h2>{trans.__('Tokens of agents')}</h2>
      {value?.tokens.length === 0 && <p>{trans.__('No agent has a token for this sandbox.')}</p>}
      <ul className="ab-tokens">
        {value?.tokens.map(token => (
          <li key={token.id}>
            <span>
              <strong>{token.name}</strong>{' '}
              {trans.__('may %1, until %2', token.verbs.join(', '), new Date(token.expires * 1000).toLocaleString())}
            </span>
            <button type="button" className="ab-button" aria-label={trans.__('Revoke %1', token.name)} onClick={() => void revoke(token.id, token.name)}>
              {trans.__('Revoke')}
            </button>
          </li>
        ))}
      </ul>
      <h2>{trans.__('Done lately by agents and programs')}</h2>
      {value?.deeds.length === 0 && <p>{trans.__('Nothing yet. What is run in the notebook is not listed here.')}</p>}
      {!!value?.deeds.length && (
        <table className="ab-table">
          <thead>
            <tr>
              <th scope="col">{trans.__('When')}</th>
              <th scope="col">{trans.__('What')}</th>
              <th scope="col">{trans.__('Who')}</th>
              <th scope="col">{trans.__('Took')}</th>
              <th scope="col">{trans.__('Problem')}</th>
            </tr>
          </thead>
          <tbody>
            {value.deeds.map((deed, index) => (
              <tr key={`${deed.time} ${index}`}>
                <td>
                  <Ago time={deed.time} trans={trans} />
                </td>
                <td>{deed.count > 1 ? `${deed.tool} × ${deed.count}` : deed.tool}</td>
                <td>{deed.token ? trans.__('agent “%1”', deed.token) : deed.by}</td>
                <td className="ab-fact">{trans.__('%1 s', deed.duration.toFixed(1))}</td>
                <td>{deed.problem}</td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
    </>
  );
}
