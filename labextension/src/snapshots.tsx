/** The Snapshots tab: take, restore, fork and delete the snapshots of a sandbox, oldest first. */
import * as React from 'react';

import { useFetched, useSignal } from './hooks.js';
import type { Part } from './view.js';
import { formatAge, formatSize, idOf } from './words.js';

export function Snapshots({ info, model, actions }: Part): JSX.Element {
  const { trans } = model;
  const path = { id: idOf(info) };
  const [isBusy, setBusy] = React.useState('');
  const [status, setStatus] = React.useState('');
  const { value, problem, again } = useFetched(async () => (await model.client.call('list_snapshots', { path })).snapshots, info.sandbox_id ?? '');
  useSignal(model.touched, sandbox => {
    if (sandbox === info.sandbox_id) {
      again();
    }
  });
  const work = (what: string, done: string, action: () => Promise<unknown>): void => {
    setBusy(what);
    setStatus(what);
    action()
      .then(
        () => {
          setStatus(done);
          model.refreshSoon();
          again();
        },
        (error: unknown) => {
          setStatus((error as Error).message);
          actions.showError(error);
        }
      )
      .finally(() => {
        setBusy('');
      });
  };
  const restore = async (id: string, name: string): Promise<void> => {
    const body = trans.__('The variables of the kernel return to their values at the time of the snapshot. Later work and open network connections will be lost. The notebook document does not change.');
    if (await actions.confirm(trans.__('Restore “%1”?', name), body, trans.__('Restore'))) {
      work(trans.__('Restoring…'), trans.__('Restored “%1”.', name), () =>
        model.client.call('restore_sandbox', { path, body: { snapshot: id } })
      );
    }
  };
  return (
    <>
      <p>
        <button
          type="button"
          className="ab-button"
          disabled={isBusy !== '' || info.state !== 'running'}
          onClick={() => {
            void actions.snapshot(info).then(again);
          }}
        >
          {trans.__('Take Snapshot…')}
        </button>
      </p>
      <p className="ab-dim">
        {trans.__('A snapshot includes variables, running programs and private files. It does not include open network connections or the files in a shared folder.')}
      </p>
      <p role="status" aria-live="polite">
        {status || problem}
      </p>
      {value?.length === 0 && <p>{trans.__('No snapshots yet.')}</p>}
      <ol className="ab-timeline" aria-label={trans.__('Snapshots, oldest first')}>
        {value?.map(item => {
          const name = item.name || trans.__('Unnamed');
          return (
            <li key={item.id}>
              <div>
                <strong>{name}</strong>
                <br />
                <span className="ab-dim">
                  {[
                    new Date(item.created * 1000).toLocaleString(),
                    trans.__('%1 ago', formatAge(Date.now() / 1000 - item.created, trans)),
                    formatSize(item.size),
                    item.is_folder_kept ? trans.__('includes files') : trans.__('shared folder not included')
                  ].join(' · ')}
                </span>
              </div>
              <div role="group" aria-label={trans.__('Actions for %1', name)} className="ab-row-actions">
                <button type="button" className="ab-button" disabled={isBusy !== ''} onClick={() => void restore(item.id, name)}>
                  {trans.__('Restore')}
                </button>
                <button
                  type="button"
                  className="ab-button"
                  disabled={isBusy !== ''}
                  onClick={() => {
                    work(trans.__('Creating fork…'), trans.__('Fork created.'), () => actions.fork(info, item.id));
                  }}
                >
                  {trans.__('Fork')}
                </button>
                <button
                  type="button"
                  className="ab-button"
                  disabled={isBusy !== ''}
                  onClick={() => {
                    void actions.confirm(trans.__('Delete “%1”?', name), '', trans.__('Delete')).then(isSure => {
                      if (isSure) {
                        work(trans.__('Deleting…'), trans.__('Deleted “%1”.', name), () => model.client.deleteSnapshot(item.id));
                      }
                    });
                  }}
                >
                  {trans.__('Delete')}
                </button>
              </div>
            </li>
          );
        })}
      </ol>
    </>
  );
}
