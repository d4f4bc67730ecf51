/** The snapshots of a sandbox in the order of time: undo to one, or fork another sandbox off it. */
import * as React from 'react';

import { useFetched, useSignal } from './hooks.js';
import type { Part } from './view.js';
import { formatAge, formatSize, idOf } from './words.js';

export function Snapshots({ info, model, actions }: Part): JSX.Element {
  const { trans } = model;
  const path = { id: idOf(info) };
  const [isBusy, setBusy] = React.useState('');
  const [said, say] = React.useState('');
  const { value, problem, again } = useFetched(async () => (await model.client.call('list_snapshots', { path })).snapshots, info.sandbox_id ?? '');
  useSignal(model.touched, sandbox => {
    if (sandbox === info.sandbox_id) {
      again();
    }
  });
  const work = (what: string, done: string, action: () => Promise<unknown>): void => {
    setBusy(what);
    say(what);
    action()
      .then(
        () => {
          say(done);
          model.refreshSoon();
          again();
        },
        (error: unknown) => {
          say((error as Error).message);
          actions.tell(error);
        }
      )
      .finally(() => {
        setBusy('');
      });
  };
  const restore = async (id: string, name: string): Promise<void> => {
    const body = trans.__('The kernel goes back to the variables of then. What it did since is lost, and so are open connections. The notebook itself stays as it is.');
    if (await actions.confirm(trans.__('Undo to “%1”?', name), body, trans.__('Undo to here'))) {
      work(trans.__('Going back…'), trans.__('It is back where “%1” was taken.', name), () =>
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
          {trans.__('Take a snapshot…')}
        </button>
      </p>
      <p className="ab-dim">
        {trans.__('A snapshot keeps variables, running programs and private files. It does not keep open connections, and no files of a folder of yours that is shown in the sandbox.')}
      </p>
      <p role="status" aria-live="polite">
        {said || problem}
      </p>
      {value?.length === 0 && <p>{trans.__('There is no snapshot yet.')}</p>}
      <ol className="ab-timeline" aria-label={trans.__('Snapshots, oldest first')}>
        {value?.map(item => {
          const name = item.name || trans.__('without a name');
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
                    item.is_folder_kept ? trans.__('with files') : trans.__('without your folder')
                  ].join(' · ')}
                </span>
              </div>
              <div role="group" aria-label={trans.__('Actions for %1', name)} className="ab-row-actions">
                <button type="button" className="ab-button" disabled={isBusy !== ''} onClick={() => void restore(item.id, name)}>
                  {trans.__('Undo to here')}
                </button>
                <button
                  type="button"
                  className="ab-button"
                  disabled={isBusy !== ''}
                  onClick={() => {
                    work(trans.__('Forking…'), trans.__('The fork is there.'), () => actions.fork(info, item.id));
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
                        work(trans.__('Deleting…'), trans.__('“%1” is deleted.', name), () => model.client.deleteSnapshot(item.id));
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
