import { LabIcon } from '@jupyterlab/ui-components';

const SHIELD = 'M12 2 4 5v6c0 5 3.4 9.7 8 11 4.6-1.3 8-6 8-11V5z';

function make(name: string, inner: string): LabIcon {
  const svgstr = `<svg xmlns="http://www.w3.org/2000/svg" width="16" height="16" viewBox="0 0 24 24">${inner}</svg>`;
  return new LabIcon({ name: `jupyter-agentbox:${name}`, svgstr });
}

/** Sandboxed: a filled shield with a tick cut out, visible in every theme. */
export const boxedIcon = make(
  'boxed',
  `<path class="jp-icon3" fill="#616161" fill-rule="evenodd" d="${SHIELD}M8.65 11.15l2.11 2.11 4.55-5.06 1.78 1.6-6.25 6.94-3.89-3.89z"/>`
);
/** Not sandboxed: an empty shield, struck through. */
export const unboxedIcon = make(
  'unboxed',
  `<path class="jp-icon3" style="fill:none" stroke="#616161" stroke-width="2" d="${SHIELD}"/>` +
    '<path class="jp-icon3" style="fill:none" stroke="#616161" stroke-width="2" d="M3 3l18 18"/>'
);
