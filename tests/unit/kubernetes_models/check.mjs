// A JSON list of manifests on standard input; a JSON list of what is wrong with each on standard output.
import { readFileSync } from "node:fs";
import { ScaledObject } from "@kubernetes-models/keda/keda.sh/v1alpha1/ScaledObject";
import { PodMonitor } from "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1/PodMonitor";

const models = { ScaledObject, PodMonitor };
const faults = JSON.parse(readFileSync(0, "utf8")).map((manifest) => {
  try {
    new models[manifest.kind](manifest).validate();
    return "";
  } catch (error) {
    return error.message;
  }
});
console.log(JSON.stringify(faults));
