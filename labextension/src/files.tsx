/** The Files tab: browse, preview, upload and download the files of a sandbox's workspace. */
import { PathExt } from '@jupyterlab/coreutils';
import * as React from 'react';

import { ROUTES } from '../../clients/typescript/src/index.js';
import { Ago } from './facts.js';
import { Folders } from './folders.js';
import { useFetched } from './hooks.js';
import type { Model } from './model.js';
import type { Part } from './view.js';
import { formatKind, formatSize, idOf, type Info } from './words.js';

/** Size limits in bytes: of previewed images, of previewed text, and of downloads, which are held in memory. */
const MAX_IMAGE = 8 * 1024 * 1024;
const MAX_TEXT = 64 * 1024;
const MAX_DOWNLOAD = 512 * 1024 * 1024;
// Not SVG, which can contain scripts.
const IMAGES: Record<string, string> = { '.png': 'image/png', '.jpg': 'image/jpeg', '.jpeg': 'image/jpeg', '.gif': 'image/gif', '.webp': 'image/webp' };

/** Upload a file and report progress. Uses XMLHttpRequest because `fetch` reports no upload progress. */
function upload(model: Model, info: Info, path: string, file: File, onProgress: (share: number) => void): Promise<void> {
  const { baseUrl, token } = model.services.serverSettings;
  const [verb, template] = ROUTES.upload_file;
  const query = new URLSearchParams({ path, size: String(file.size) }).toString();
  const request = new XMLHttpRequest();
  request.open(verb, `${baseUrl}api/agentbox${template.replace('{id}', encodeURIComponent(idOf(info)))}?${query}`);
  request.setRequestHeader('Content-Type', 'application/octet-stream');
  if (token) {
    request.setRequestHeader('Authorization', `token ${token}`);
  }
  const xsrf = /(?:^|; ?)_xsrf=([^;]*)/.exec(document.cookie)?.[1];
  if (xsrf) {
    request.setRequestHeader('X-XSRFToken', xsrf);
  }
  return new Promise((resolve, reject) => {
    request.upload.onprogress = event => {
      onProgress(event.total > 0 ? event.loaded / event.total : 0);
    };
    request.onload = () => {
      if (request.status < 300) {
        resolve();
        return;
      }
      let message = `${request.status} ${request.statusText}`;
      try {
        message = (JSON.parse(request.responseText) as { message: string }).message;
      } catch {
        // The body is not a JSON error of the server extension.
      }
      reject(new Error(message));
    };
    request.onerror = () => {
      reject(new Error(model.trans.__('The server did not respond.')));
    };
    request.send(file);
  });
}

/** Download a file, report progress, and pass the file to the browser. */
async function download(model: Model, info: Info, path: string, onProgress: (share: number) => void): Promise<void> {
  const response = await model.client.sandbox(idOf(info)).files.download(path);
  const size = Number(response.headers.get('Content-Length') ?? 0);
  if (size > MAX_DOWNLOAD) {
    await response.body?.cancel();
    throw new Error(model.trans.__('The file is larger than %1. Download it with the REST API.', formatSize(MAX_DOWNLOAD)));
  }
  const parts: Uint8Array[] = [];
  let count = 0;
  const reader = response.body?.getReader();
  for (let part = await reader?.read(); part?.value; part = await reader?.read()) {
    parts.push(part.value);
    count += part.value.length;
    onProgress(size > 0 ? count / size : 0);
  }
  const address = URL.createObjectURL(new Blob(parts as BlobPart[], { type: 'application/octet-stream' }));
  const link = document.createElement('a');
  link.href = address;
  link.download = PathExt.basename(path);
  link.click();
  setTimeout(() => {
    URL.revokeObjectURL(address);
  }, 60000);
}

interface Shown {
  path: string;
  text: string;
  image: string;
}

async function preview(model: Model, info: Info, path: string, size: number): Promise<Shown> {
  const { files } = model.client.sandbox(idOf(info));
  const type = IMAGES[PathExt.extname(path).toLowerCase()];
  if (type !== undefined && size <= MAX_IMAGE) {
    const bytes = await (await files.download(path)).arrayBuffer();
    return { path, text: '', image: URL.createObjectURL(new Blob([bytes], { type })) };
  }
  const content = await files.read(path, { length: MAX_TEXT });
  const text = content.is_text && content.encoding === 'utf-8' ? content.data : model.trans.__('This file is not text and cannot be previewed.');
  return { path, text: content.truncated ? `${text}\n${model.trans.__('… (truncated)')}` : text, image: '' };
}

export function Files({ info, model, actions }: Part): JSX.Element {
  const { trans } = model;
  const [folder, setFolder] = React.useState('.');
  const [shown, setShown] = React.useState<Shown | null>(null);
  const [work, setWork] = React.useState<{ name: string; share: number } | null>(null);
  const [status, setStatus] = React.useState('');
  const [isOver, setOver] = React.useState(false);
  const picker = React.useRef<HTMLInputElement>(null);
  const { value, problem, again } = useFetched(() => model.client.sandbox(idOf(info)).files.list(folder), `${info.sandbox_id ?? ''} ${folder}`);
  React.useEffect(
    () => () => {
      if (shown?.image) {
        URL.revokeObjectURL(shown.image);
      }
    },
    [shown]
  );

  const run = async (name: string, done: string, action: (onProgress: (share: number) => void) => Promise<void>): Promise<void> => {
    setWork({ name, share: 0 });
    try {
      await action(share => {
        setWork({ name, share });
      });
      setStatus(done);
    } catch (error) {
      setStatus((error as Error).message);
      actions.showError(error);
    }
    setWork(null);
  };
  const send = async (files: FileList | null): Promise<void> => {
    for (const file of files ?? []) {
      const path = folder === '.' ? file.name : `${folder}/${file.name}`;
      await run(file.name, trans.__('Uploaded %1.', file.name), onProgress => upload(model, info, path, file, onProgress));
    }
    again();
  };
  const parts = folder === '.' ? [] : folder.split('/');
  return (
    <div
      className={isOver ? 'ab-files ab-mod-over' : 'ab-files'}
      onDragOver={event => {
        event.preventDefault();
        setOver(true);
      }}
      onDragLeave={() => {
        setOver(false);
      }}
      onDrop={event => {
        event.preventDefault();
        event.stopPropagation();
        setOver(false);
        void send(event.dataTransfer.files);
      }}
    >
      <nav aria-label={trans.__('Folder path')} className="ab-row-actions">
        <button type="button" className="ab-button" onClick={() => {
          setFolder('.');
        }}>
          /workspace
        </button>
        {parts.map((part, index) => (
          <button type="button" className="ab-button" key={index} onClick={() => {
            setFolder(parts.slice(0, index + 1).join('/'));
          }}>
            {part}
          </button>
        ))}
        <button type="button" className="ab-button ab-mod-right" onClick={() => picker.current?.click()}>
          {trans.__('Upload…')}
        </button>
        <button type="button" className="ab-button" onClick={again}>
          {trans.__('Refresh')}
        </button>
        <input ref={picker} type="file" multiple hidden aria-label={trans.__('Files to upload')} onChange={event => void send(event.target.files)} />
      </nav>
      <p className="ab-dim">{trans.__('Drop files here to upload them.')}</p>
      <p role="status" aria-live="polite">
        {status || problem}
      </p>
      {work && (
        <p>
          <label>
            {work.name} <progress value={work.share} max={1} />
          </label>
        </p>
      )}
      {value?.entries.length === 0 && <p>{trans.__('This folder is empty.')}</p>}
      {!!value?.entries.length && (
        <table className="ab-table">
          <thead>
            <tr>
              <th scope="col">{trans.__('Name')}</th>
              <th scope="col">{trans.__('Size')}</th>
              <th scope="col">{trans.__('Modified')}</th>
              <th scope="col">{trans.__('Actions')}</th>
            </tr>
          </thead>
          <tbody>
            {value.entries.map(entry => {
              const name = PathExt.basename(entry.path);
              const isFolder = entry.kind === 'directory';
              return (
                <tr key={entry.path}>
                  <th scope="row">
                    <button
                      type="button"
                      className="ab-link"
                      disabled={!isFolder && entry.kind !== 'file'}
                      onClick={() => {
                        if (isFolder) {
                          setFolder(entry.path);
                        } else {
                          preview(model, info, entry.path, entry.size).then(setShown, (error: unknown) => {
                            actions.showError(error);
                          });
                        }
                      }}
                    >
                      {isFolder ? `${name}/` : name}
                    </button>
                  </th>
                  <td className="ab-fact">{entry.kind === 'file' ? formatSize(entry.size) : formatKind(entry.kind, trans)}</td>
                  <td>
                    <Ago time={entry.mtime} trans={trans} />
                  </td>
                  <td>
                    {entry.kind === 'file' && (
                      <button
                        type="button"
                        className="ab-button"
                        aria-label={trans.__('Download %1', name)}
                        onClick={() => void run(name, trans.__('Downloaded %1.', name), onProgress => download(model, info, entry.path, onProgress))}
                      >
                        {trans.__('Download')}
                      </button>
                    )}
                  </td>
                </tr>
              );
            })}
          </tbody>
        </table>
      )}
      {value?.truncated && <p>{trans.__('This folder has more files than are shown.')}</p>}
      {shown && (
        <section aria-label={trans.__('Preview of %1', shown.path)} className="ab-preview">
          <h2>{shown.path}</h2>
          {shown.image ? <img src={shown.image} alt={trans.__('Image %1', shown.path)} /> : <pre tabIndex={0}>{shown.text}</pre>}
        </section>
      )}
      {info.kind === 'notebook' && info.state === 'running' && <Folders info={info} model={model} actions={actions} />}
    </div>
  );
}
