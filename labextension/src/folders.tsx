/** The folders from outside the workspace that the user added to a notebook's sandbox, in the Files tab. */
import { PathExt } from '@jupyterlab/coreutils';
import * as React from 'react';

import type { components } from '../../clients/typescript/src/schema.js';
import { useFetched } from './hooks.js';
import type { Part } from './view.js';
import { idOf } from './words.js';

type Folder = components['schemas']['FolderInfo'];
type Scope = Folder['scope'];

export function Folders({ info, model, actions }: Part): JSX.Element {
  const { trans } = model;
  const path = { id: idOf(info) };
  const [source, setSource] = React.useState('');
  const [scope, setScope] = React.useState<Scope | undefined>();
  const { value, problem, again } = useFetched(() => model.client.call('list_folders', { path }), info.sandbox_id ?? '');
  const labels: Record<Scope, string> = {
    notebook: trans.__('this notebook'),
    always: trans.__('all notebooks with profile %1', info.profile)
  };
  const chosen = scope ?? value?.scopes[0];
  const change = (work: Promise<unknown>): void => {
    work.then(
      () => {
        setSource('');
        again();
      },
      (error: unknown) => {
        actions.showError(error);
      }
    );
  };
  const folders = value?.folders ?? [];
  return (
    <section aria-label={trans.__('Folders outside the notebook’s folder')} className="ab-folders">
      <h2>{trans.__('Folders outside the notebook’s folder')}</h2>
      {problem && <p role="status">{problem}</p>}
      <ul className="ab-rules">
        {folders.map(folder => (
          <li key={`${folder.source} ${folder.scope}`} title={folder.target}>
            <span>
              <strong>{folder.source}</strong> {trans.__('read-only, for %1', folder.scope === 'notebook' ? PathExt.basename(folder.target) : labels.always)}
              {!folder.is_shown && <em> {trans.__('Visible after the kernel restarts.')}</em>}
            </span>
            <button
              type="button"
              className="ab-button"
              aria-label={trans.__('Remove %1', folder.source)}
              onClick={() => {
                change(model.client.call('remove_folder', { path, query: { source: folder.source, scope: folder.scope } }));
              }}
            >
              {trans.__('Remove')}
            </button>
          </li>
        ))}
      </ul>
      {folders.some(folder => !folder.is_shown) && (
        <button type="button" className="ab-button" onClick={() => void actions.run('restart', info)}>
          {trans.__('Restart Kernel…')}
        </button>
      )}
      {value?.may_add && chosen && (
        <form
          className="ab-row-actions"
          onSubmit={event => {
            event.preventDefault();
            change(model.client.call('add_folder', { path, body: { source, scope: chosen } }));
          }}
        >
          <input
            className="ab-input"
            value={source}
            required
            placeholder={trans.__('Folder on the server, such as ~/data')}
            aria-label={trans.__('Folder on the server')}
            onChange={event => {
              setSource(event.target.value);
            }}
          />
          <select
            className="ab-input"
            value={chosen}
            aria-label={trans.__('Add for')}
            onChange={event => {
              setScope(event.target.value as Scope);
            }}
          >
            {value.scopes.map(item => (
              <option key={item} value={item}>
                {labels[item]}
              </option>
            ))}
          </select>
          <button type="submit" className="ab-button">
            {trans.__('Add Folder')}
          </button>
        </form>
      )}
      {value && !value.may_add && <p>{value.message}</p>}
    </section>
  );
}
