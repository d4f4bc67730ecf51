/** The Activity tab: who is using the sandbox, the tokens of agents, and recent activity. */
import * as React from 'react';

import { Ago } from './facts.js';
import { useFetched, useSignal } from './hooks.js';
import { findCurrentUse, listOperations, type CurrentUse } from './rows.js';
import type { Part } from './view.js';
import { formatAge, type Trans, idOf } from './words.js';

function formatCurrentUse(use: CurrentUse, trans: Trans): string {
  switch (use.kind) {
    case 'agent':
      return trans.__('The agent with token “%1” is using this kernel: %2, running for %3.', use.name, use.tool, formatAge(Date.now() / 1000 - use.since, trans));
    case 'program':
      return trans.__('A program run by %1 is using this kernel: %2, running for %3.', use.name, use.tool, formatAge(Date.now() / 1000 - use.since, trans));
    case 'person':
      return trans.__('A notebook cell is running.');
    case 'none':
      return trans.__('No one is using this kernel.');
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
    return { operations: listOperations(log.rows), tokens: tokens.tokens };
  }, `${info.sandbox_id ?? ''} ${info.state}`);
  useSignal(model.touched, sandbox => {
    if (sandbox === info.sandbox_id) {
      again();
    }
  });
  const revoke = async (id: string, name: string): Promise<void> => {
    if (await actions.confirm(trans.__('Revoke token “%1”?', name), trans.__('Its holder will lose access to this sandbox.'), trans.__('Revoke'))) {
      await model.client.call('revoke_token', { path: { id: idOf(info), token: id } }).catch((error: unknown) => {
        actions.showError(error);
      });
      again();
    }
  };
  return (
    <>
      <p role="status" aria-live="polite" className="ab-current-use">
        {formatCurrentUse(findCurrentUse(info, model.isBusy(info)), trans)}
      </p>
      {problem && <p role="alert">{problem}</p>}
      <h2>{trans.__('Agent tokens')}</h2>
      {value?.tokens.length === 0 && <p>{trans.__('No agent has a token for this sandbox.')}</p>}
      <ul className="ab-tokens">
        {value?.tokens.map(token => (
          <li key={token.id}>
            <span>
              <strong>{token.name}</strong>{' '}
              {trans.__('allows %1; expires %2', token.verbs.join(', '), new Date(token.expires * 1000).toLocaleString())}
            </span>
            <button type="button" className="ab-button" aria-label={trans.__('Revoke %1', token.name)} onClick={() => void revoke(token.id, token.name)}>
              {trans.__('Revoke')}
            </button>
          </li>
        ))}
      </ul>
      <h2>{trans.__('Recent activity')}</h2>
      {value?.operations.length === 0 && <p>{trans.__('No activity yet. Notebook cells are not listed here.')}</p>}
      {!!value?.operations.length && (
        <table className="ab-table">
          <thead>
            <tr>
              <th scope="col">{trans.__('Time')}</th>
              <th scope="col">{trans.__('Operation')}</th>
              <th scope="col">{trans.__('Run by')}</th>
              <th scope="col">{trans.__('Duration')}</th>
              <th scope="col">{trans.__('Error')}</th>
            </tr>
          </thead>
          <tbody>
            {value.operations.map((operation, index) => (
              <tr key={`${operation.time} ${index}`}>
                <td>
                  <Ago time={operation.time} trans={trans} />
                </td>
                <td>{operation.count > 1 ? `${operation.tool} × ${operation.count}` : operation.tool}</td>
                <td>{operation.token ? trans.__('agent “%1”', operation.token) : operation.by}</td>
                <td className="ab-fact">{trans.__('%1 s', operation.duration.toFixed(1))}</td>
                <td>{operation.problem}</td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
    </>
  );
}
